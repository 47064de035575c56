"""What is said between the process that starts ranks and the ranks."""

from dataclasses import dataclass

from labkit.collectives.network import Network
from labkit.ranks.reports import Report
from labkit.record import RankRecord


@dataclass(frozen=True)
class Job:
    """How a rank is to start. Everything is explicit: the process that forks ranks has an environment of its own."""

    rank: int
    world_size: int
    backend: str
    timeout: float  # seconds of one wait without progress
    start_limit: float  # seconds for a group to be complete
    threads: int
    stores: str  # the folder with one FileStore a group: no ports that could collide
    network: Network | None
    check: bool
    environment: dict[str, str]
    path: list[str]
    folder: str


@dataclass(frozen=True)
class Call:
    """One thing to run. With it travels a packed ("function", function, args, kwargs), ("cell", source, number),
    ("push", names) or ("pull", name)."""

    number: int
    record: bool
    timeout: float


@dataclass(frozen=True)
class Lines:
    """Source lines of notebook cells travel with it, packed, for tracebacks."""


@dataclass(frozen=True)
class Regroup:
    """Leave the group and build a new one, the `number`th."""

    number: int


@dataclass(frozen=True)
class Ready:
    """A rank has joined its group."""

    pid: int
    preloaded: bool


@dataclass(frozen=True)
class Answer:
    """What came of a call: a report, or none and then the packed result travels with it; and what was recorded."""

    number: int
    report: Report | None
    record: RankRecord | None
    grouped: bool  # whether the rank still has its group
