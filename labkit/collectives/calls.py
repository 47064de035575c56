"""What this process is doing: the operation that transfers are counted under, and what a thread waits for.

The operation is the outermost labkit call in progress, so that an all-reduce made of sends counts as all-reduce.
"""

import threading
import time
from typing import Any, NamedTuple

from labkit.collectives.groups import Endpoint
from labkit.record import add_span, recording


class Waiting(NamedTuple):
    """A thread is blocked in `operation`, on rank `peer` (global), since `since` (perf_counter seconds)."""

    operation: str
    peer: int
    sending: bool
    since: float


#: thread id -> what it waits for; read by the thread that answers "where are you?"
waiting: dict[int, Waiting] = {}

_local = threading.local()
_begun = _done = 0
_counting = threading.Lock()


def begin_transfer() -> None:
    """Count a message on its way; `end_transfer` follows when it has been waited for."""
    global _begun
    with _counting:
        _begun += 1


def end_transfer() -> None:
    global _done
    with _counting:
        _done += 1


def transfers_begun() -> int:
    """How many messages this process has begun to send or receive: it grows while there is progress."""
    return _begun


def unfinished() -> int:
    """How many messages this process has begun and never waited for, since `forget_unfinished`."""
    return _begun - _done


def forget_unfinished() -> None:
    """Called when the group is built anew: what was on its way in the old one is gone."""
    global _done
    _done = _begun


def current_operation(default: str) -> str:
    """The operation that a transfer of this thread belongs to."""
    return getattr(_local, "operation", None) or default


def is_control() -> bool:
    """Whether the operation in progress carries no payload, as a barrier: counted apart and never delayed."""
    return getattr(_local, "control", False)


class operation:  # used as a function
    """A block whose messages count as `name`, recorded as one span of kind communication with `details`. Inside another
    such block it changes nothing, but `control` marks what is no payload."""

    __slots__ = ("before", "begin", "control", "details", "end", "name")

    def __init__(self, name: str, end: Endpoint, *, control: bool = False, **details: Any) -> None:
        self.name, self.end, self.control, self.details = name, end, control, details

    def __enter__(self) -> None:
        self.before = outer, was_control = current_operation(""), is_control()
        if not outer or self.control:
            _local.operation, _local.control = outer or self.name, self.control or was_control
        self.begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        _local.operation, _local.control = self.before
        if recording() and not self.before[0]:
            add_span(self.name, "communication", self.begin, time.perf_counter(), group=self.end.name, **self.details)
