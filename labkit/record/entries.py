"""What a record is made of: spans of time, transfers between ranks, and samples of memory.

Times are seconds on the clock of the process that collects the record (`time.perf_counter` there). Sizes are bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

#: The kinds of span that pictures know, each with one colour. Any other word is drawn as "other".
KINDS = ("data", "forward", "backward", "step", "communication", "wait", "checkpoint", "other")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one rank, from `start` to `end` seconds."""

    name: str
    kind: str
    rank: int
    start: float
    end: float
    details: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message that `rank` sent to, or received from, `peer` (global ranks).

    `control` marks what is no payload: headers, barriers. It is counted apart.
    """

    time: float
    rank: int
    peer: int
    bytes: int
    operation: str
    group: str
    sent: bool
    control: bool = False


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The bytes of one kind (parameters, gradients, ...) alive on `rank` at `time`."""

    time: float
    rank: int
    kind: str
    bytes: int
