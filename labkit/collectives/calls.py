"""What this process is doing: the operation that transfers are counted under, and what a thread waits for.

The operation is the outermost labkit call in progress, so that an all-reduce made of sends counts as all-reduce.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from labkit.collectives.groups import name_of
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


def begin_transfer() -> None:
    """Count a message on its way; `end_transfer` follows when it has been waited for."""
    global _begun
    _begun += 1


def end_transfer() -> None:
    global _done
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
def operation(name: str, group: dist.ProcessGroup, *, control: bool = False, **details: Any) -> Iterator[None]:
    """Count what happens inside as `name`, and record it as one span of kind communication."""
    if getattr(_local, "operation", None):
        yield
        return
    _local.operation, _local.control = name, control
    start = time.perf_counter()
    try:
        yield
    finally:
        _local.operation, _local.control = None, False
        if recording():
            add_span(name, "communication", start, time.perf_counter(), group=name_of(group), **details)


@contextmanager
def waiting_for(name: str, peer: int, *, sending: bool) -> Iterator[None]:
    """Publish that this thread is blocked on `peer`."""
    thread = threading.get_ident()
    waiting[thread] = Waiting(name, peer, sending, time.perf_counter())
    try:
        yield
    finally:
        waiting.pop(thread, None)
