"""The one recorder, and the calls by which labkit's code tells it what happens.

With no recorder open these calls test one list and return, so that recording costs nothing when it is off.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

from labkit.record.entries import MemorySample, Span, Transfer
from labkit.record.record import Record

_open: list["Recorder"] = []
_rank = 0
_change = threading.Lock()


class Recorder(Record):
    """Records what happens while it is open.

    In a rank:      `with Recorder() as record: ...`, then `record.bytes_sent` is this rank's int.
    In a notebook:  `with Recorder() as record: ranks.run(...)`, then it is a list in rank order.
    Several calls inside one `with` add up. Recorders may be nested; each sees everything while it is open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranks[0].rank = _rank

    def __enter__(self) -> Self:
        with _change:
            _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _change:
            # by identity: two records that hold the same are equal
            _open[:] = [one for one in _open if one is not self]


def set_rank(rank: int) -> None:
    """Tell the recorder which rank this process is. Called once, when a rank starts."""
    global _rank
    _rank = rank


def recorders() -> list[Recorder]:
    """The recorders that are open in this process, the outermost first."""
    return list(_open)


def recording() -> bool:
    """Whether any recorder is open in this process."""
    return bool(_open)


@contextmanager
def _timed(name: str, kind: str, details: dict[str, Any]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        add_span(name, kind, start, time.perf_counter(), **details)


def span(name: str, kind: str = "other", **details: Any) -> Any:
    """A context manager that records how long its body took, as `kind` (see `KINDS`)."""
    return _timed(name, kind, details) if _open else nullcontext()


def add_span(name: str, kind: str, start: float, end: float, **details: Any) -> None:
    """Record a span whose ends, in `time.perf_counter` seconds, are known already."""
    for recorder in _open:
        if not recorder.merged:
            recorder.ranks[0].events.append(Span(name, kind, _rank, start, end, details))


def add_transfer(peer: int, nbytes: int, *, operation: str, group: str, sent: bool, control: bool = False) -> None:
    """Record one message of `nbytes` bytes to (`sent`) or from the global rank `peer`."""
    for recorder in _open:
        if not recorder.merged:
            now = time.perf_counter()
            entry = Transfer(now, _rank, peer, nbytes, operation, group, sent, control)
            recorder.ranks[0].transfers.append(entry)


def add_memory(kind: str, nbytes: int) -> None:
    """Record that `nbytes` bytes of `kind` are alive now on this rank."""
    for recorder in _open:
        if not recorder.merged:
            recorder.ranks[0].memory.append(MemorySample(time.perf_counter(), _rank, kind, nbytes))
