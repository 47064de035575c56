"""A failed comparison: all that is known of it when a cause is looked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from labkit.verify.courses import Course, Named, Task
from labkit.verify.differences import Difference


@dataclass(frozen=True)
class Cause:
    """What is probably wrong: a short name, the same for the same mistake, and a sentence."""

    name: str
    sentence: str


@dataclass(frozen=True)
class Failure:
    """`first` are the bad differences of the earliest `kind` of result (see `KINDS`) that has any."""

    task: Task
    ranks: Sequence[Course]
    truth: Course
    reference: str
    kind: str
    first: Sequence[Difference]

    @property
    def pairs(self) -> list[tuple[int, str]]:
        """Every (rank, name) that differs."""
        return [(rank, one.name) for one in self.first for rank in one.ranks]

    @cached_property
    def bad_ranks(self) -> list[int]:
        return sorted({rank for one in self.first for rank in one.ranks})

    @property
    def told_ranks(self) -> str:
        """The ranks that differ, in words."""
        if len(self.bad_ranks) == 1:
            return f"rank {self.bad_ranks[0]}"
        return "ranks " + ", ".join(map(str, self.bad_ranks[:-1])) + f" and {self.bad_ranks[-1]}"

    def ours(self, rank: int, name: str) -> Tensor | None:
        """What the rank has under that name."""
        named: Named = getattr(self.ranks[rank], self.kind)
        return named.get(name)

    def true(self, name: str) -> Tensor | None:
        """What the truth has under that name."""
        named: Named = getattr(self.truth, self.kind)
        return named.get(name)
