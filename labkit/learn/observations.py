"""What was seen of a learner's function: on one rank, and on all ranks of one trial."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.record import RankRecord

if TYPE_CHECKING:
    from labkit.learn.exercises import Trial


@dataclass(frozen=True)
class Observation:
    """One rank's part of a trial: what came back, what the recorder saw, and which inputs were changed."""

    rank: int
    value: Any
    record: RankRecord = field(default_factory=RankRecord)
    changed: tuple[int, ...] = ()  # positions of the inputs that are not as they were

    def peak(self, kind: str) -> int | None:
        """The most bytes of one kind of memory that were alive at once, None if none of the kind was recorded."""
        return max((sample.bytes for sample in self.record.memory if sample.kind == kind), default=None)


@dataclass(frozen=True)
class Outcome:
    """One trial on all of its ranks, in rank order."""

    trial: "Trial"
    ranks: tuple[Observation, ...]

    @property
    def world_size(self) -> int:
        return self.trial.world_size

    @property
    def values(self) -> list[Any]:
        """What the function returned, in rank order."""
        return [one.value for one in self.ranks]

    def inputs(self, rank: int) -> tuple[Any, ...]:
        """The inputs that `rank` was given, made anew."""
        return self.trial.inputs(rank, self.world_size)
