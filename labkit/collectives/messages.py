"""One message under way, as its sender and as its receiver see it. Everything that ranks exchange passes here.

A message is recorded; with `headed` its shape and dtype are checked against what the other side expects; an emulated
network delays its delivery. `place` is the peer's position in the group.
"""

import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from labkit.collectives.calls import Waiting, begin_transfer, current_operation, end_transfer, is_control, waiting
from labkit.collectives.groups import Endpoint
from labkit.collectives.headers import WORDS, Header, header_of, header_tag, payload_tag
from labkit.collectives.settings import settings
from labkit.collectives.stamps import fits, room_for, stamp, unstamp
from labkit.record import add_transfer, recording


class Work(Protocol):
    """A transfer or collective under way, as torch.distributed's: `wait` for it before touching the tensor."""

    def wait(self, timeout: timedelta | None = None) -> bool: ...

    def is_completed(self) -> bool: ...


class _Message:
    __slots__ = ("control", "end", "finished", "headed", "name", "peer", "place", "stamped", "tag")

    def __init__(self, end: Endpoint, tensor: torch.Tensor, place: int, tag: int, headed: bool, default: str) -> None:
        self.end, self.place, self.peer = end, place, end.members[place]
        self.name, self.control = current_operation(default), is_control()
        self.tag, self.finished = tag, False
        emulated = settings.emulator is not None and not self.control  # control traffic is never delayed
        self.stamped = emulated and not (end.nccl or headed) and fits(tensor)
        self.headed = not end.nccl and (headed or emulated) and not self.stamped
        begin_transfer()

    def payload_tag(self, tensor: torch.Tensor) -> int:
        return 0 if self.end.nccl else payload_tag(self.tag, tensor, checked=self.headed)

    def count(self, tensor: torch.Tensor, *, sent: bool, control: bool = False) -> None:
        if recording():
            nbytes = tensor.numel() * tensor.element_size()
            control = control or self.control
            add_transfer(self.peer, nbytes, operation=self.name, group=self.end.name, sent=sent, control=control)

    def await_work(self, work: Any, timeout: timedelta | None, *, sending: bool) -> None:
        thread = threading.get_ident()
        waiting[thread] = Waiting(self.name, self.peer, sending, time.perf_counter())
        try:
            # without a timeout of its own it is bounded by the group's
            work.wait() if timeout is None else work.wait(timeout)
        finally:
            del waiting[thread]


class Sending(_Message):
    """A message on its way out: `tensor` (contiguous) must not change until `wait` returns."""

    __slots__ = ("header", "left", "payload", "works")

    def __init__(self, end: Endpoint, tensor: torch.Tensor, place: int, tag: int, *, headed: bool) -> None:
        super().__init__(end, tensor, place, tag, headed, "send")
        # kept alive until wait(): the backend reads from them
        self.payload = tensor
        self.left = arrival = 0.0
        emulator = settings.emulator
        if emulator is not None and not end.nccl and not self.control:
            self.left, arrival = emulator.depart(self.peer, tensor.numel() * tensor.element_size())
        self.works = []
        if self.headed:
            self.header = header_of(tensor, arrival=arrival).encode()
            self.works.append(end.group.send([self.header], place, header_tag(tag)))
            self.count(self.header, sent=True, control=True)
        if self.stamped:
            self.payload = stamp(tensor, arrival)
            self.count(self.payload[-8:], sent=True, control=True)
        self.works.append(end.group.send([self.payload], place, self.payload_tag(tensor)))
        self.count(tensor, sent=True)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.finished:
            for work in self.works:
                self.await_work(work, timeout, sending=True)
            if self.left and settings.emulator is not None:
                settings.emulator.wait_until(self.left)
            self.finished = True
            end_transfer()
        return True

    def is_completed(self) -> bool:
        return self.finished or all(work.is_completed() for work in self.works)


class Receiving(_Message):
    """A message on its way in. Its buffer is posted at once, so that it fills while this rank does other things."""

    __slots__ = ("buffer", "heading", "tensor", "words", "work")

    def __init__(self, end: Endpoint, tensor: torch.Tensor, place: int, tag: int, *, headed: bool) -> None:
        super().__init__(end, tensor, place, tag, headed, "recv")
        self.tensor = tensor
        if self.stamped:
            self.buffer = room_for(tensor)
        elif tensor.is_contiguous():
            self.buffer = tensor
        else:
            self.buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self.words = torch.zeros(WORDS, dtype=torch.int64) if self.headed else None
        self.heading = end.group.recv([self.words], place, header_tag(tag)) if self.words is not None else None
        self.work = end.group.recv([self.buffer], place, self.payload_tag(tensor))

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.finished:
            return True
        arrival = 0.0
        if self.words is not None:
            self.await_work(self.heading, timeout, sending=False)
            header = Header.decode(self.words)
            self.compare(header)
            arrival = header.arrival
            self.count(self.words, sent=False, control=True)
        self.await_work(self.work, timeout, sending=False)
        if self.stamped:
            arrival = unstamp(self.buffer, self.tensor)
            self.count(self.buffer[-8:], sent=False, control=True)
        if arrival and settings.emulator is not None:
            settings.emulator.wait_until(arrival)
        if not self.stamped and self.buffer is not self.tensor:
            self.tensor.copy_(self.buffer)
        self.count(self.tensor, sent=False)
        self.finished = True
        end_transfer()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once; an emulated delay not counted."""
        heading = self.heading is None or self.heading.is_completed()
        return self.finished or (heading and self.work.is_completed())

    def compare(self, sent: Header) -> None:
        wanted = header_of(self.tensor)
        if (sent.dtype, sent.shape) != (wanted.dtype, wanted.shape):
            raise RuntimeError(
                f"{self.name}: rank {self.peer} sends {sent} but rank {dist.get_rank()} expects {wanted}: "
                "give both the same shape and dtype"
            )
