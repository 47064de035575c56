"""What this process is doing: the operation that transfers are counted under, and what a thread waits for.

The operation is the outermost labkit call in progress, so that an all-reduce made of sends counts as all-reduce.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from labkit.collectives.groups import Endpoint
from labkit.record import add_span, recording


@dataclass(frozen=True)
class Waiting:
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


@contextmanager
def operation(name: str, end: Endpoint, *, control: bool = False, **details: Any) -> Iterator[None]:
    """Count what happens inside as `name`, and record it as one span of kind communication."""
    outer = getattr(_local, "operation", None)
    if outer and not control:
        yield
        return
    was_control = is_control()
    _local.operation, _local.control = outer or name, control
    start = time.perf_counter()
    try:
        yield
    finally:
        _local.operation, _local.control = outer, was_control
        if recording() and not outer:
            add_span(name, "communication", start, time.perf_counter(), group=end.name, **details)
