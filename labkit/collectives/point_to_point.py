"""`send`, `recv`, `isend`, `irecv`: the only two things that ranks can do. All collectives are made of them.

Semantics and names are torch.distributed's. Added: every message is recorded, shape and dtype are checked between
the ranks, and an emulated network delays the delivery.
"""

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from labkit.collectives.calls import (
    begin_transfer,
    current_operation,
    end_transfer,
    is_control,
    operation,
    waiting_for,
)
from labkit.collectives.groups import Group, global_rank, name_of, resolve
from labkit.collectives.headers import MAX_TAG, WORDS, Header, header_of, header_tag, payload_tag
from labkit.collectives.settings import settings
from labkit.record import add_transfer, recording


class Work(Protocol):
    """A transfer or collective under way, as torch.distributed's: `wait` for it before touching the tensor."""

    def wait(self, timeout: timedelta | None = None) -> bool: ...

    def is_completed(self) -> bool: ...


def isend(
    tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, *, group_dst: int | None = None
) -> Work:
    """Start sending `tensor` to the global rank `dst` (or the group's rank `group_dst`); it must not change until
    `wait()` returns. Any shape, dtype and stride."""
    return _Sending(tensor, dst, group, tag, group_dst)


def irecv(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, *, group_src: int | None = None
) -> Work:
    """Start receiving into `tensor` from the global rank `src` (or the group's rank `group_src`). `wait()` raises a
    RuntimeError that names both sides where the shape or dtype sent is another. Waits are meant in the order of the
    receives."""
    return _Receiving(tensor, src, group, tag, group_src)


def send(
    tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, *, group_dst: int | None = None
) -> None:
    """Send `tensor` to the global rank `dst` and wait until it has left. See `isend`."""
    with operation("send", resolve(group)):
        isend(tensor, dst, group, tag, group_dst=group_dst).wait()


def recv(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, *, group_src: int | None = None
) -> int:
    """Receive into `tensor` from the global rank `src`, wait for it, and return `src`. See `irecv`."""
    with operation("recv", resolve(group)):
        work = _Receiving(tensor, src, group, tag, group_src)
        work.wait()
    return work.peer


class _Transfer:
    """What both directions share: the peer, the tags, whether headers travel."""

    def __init__(self, tensor: torch.Tensor, peer: int | None, group: Group, tag: int, place: int | None, what: str):
        self.group = resolve(group)
        self.peer = global_rank(self.group, peer, place, what)
        if self.peer == dist.get_rank():
            raise ValueError(f"{what} is rank {self.peer} itself: a rank can't send to itself, copy the tensor instead")
        if not 0 <= tag < MAX_TAG:
            raise ValueError(f"tag is {tag}; give one from 0 to {MAX_TAG - 1}")
        # NCCL matches messages by order alone and takes GPU tensors only: there are no headers on it
        self.plain = dist.get_backend(self.group) == "nccl"
        self.headed = not self.plain and (settings.check or settings.emulator is not None)
        self.tag = 0 if self.plain else payload_tag(tag, tensor, checked=self.headed)
        self.header_tag = header_tag(tag)
        self.finished = False
        begin_transfer()

    def count(self, tensor: torch.Tensor, *, sent: bool, control: bool = False) -> None:
        if recording():
            name = current_operation("send" if sent else "recv")
            group, nbytes = name_of(self.group), tensor.numel() * tensor.element_size()
            control = control or is_control()
            add_transfer(self.peer, nbytes, operation=name, group=group, sent=sent, control=control)


class _Sending(_Transfer):
    def __init__(self, tensor: torch.Tensor, dst: int | None, group: Group, tag: int, place: int | None):
        super().__init__(tensor, dst, group, tag, place, "dst")
        self.name = current_operation("send")
        # kept alive until wait(): the backend reads from them
        self.payload = tensor.detach().contiguous()
        self.left = arrival = 0.0
        if settings.emulator is not None and not self.plain and not is_control():
            nbytes = tensor.numel() * tensor.element_size()
            self.left, arrival = settings.emulator.depart(self.peer, nbytes)
        self.works = []
        if self.headed:
            self.header = header_of(tensor, arrival=arrival).encode()
            self.works.append(dist.isend(self.header, self.peer, self.group, self.header_tag))
            self.count(self.header, sent=True, control=True)
        self.works.append(dist.isend(self.payload, self.peer, self.group, self.tag))
        self.count(self.payload, sent=True)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.finished:
            with waiting_for(self.name, self.peer, sending=True):
                for work in self.works:
                    _wait(work, timeout)
                if settings.emulator is not None:
                    settings.emulator.wait_until(self.left)
            self.finished = True
            end_transfer()
        return True

    def is_completed(self) -> bool:
        return self.finished or all(work is None or work.is_completed() for work in self.works)


class _Receiving(_Transfer):
    def __init__(self, tensor: torch.Tensor, src: int | None, group: Group, tag: int, place: int | None):
        super().__init__(tensor, src, group, tag, place, "src")
        self.name = current_operation("recv")
        self.tensor = tensor.detach()
        self.buffer = self.tensor if tensor.is_contiguous() else torch.empty_like(self.tensor).contiguous()
        self.words = torch.zeros(WORDS, dtype=torch.int64)
        self.heading = dist.irecv(self.words, self.peer, self.group, self.header_tag) if self.headed else None
        # posted ahead: it fills while this rank does other things, if what was sent fits
        self.work = dist.irecv(self.buffer, self.peer, self.group, self.tag)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.finished:
            return True
        with waiting_for(self.name, self.peer, sending=False):
            arrival = 0.0
            if self.headed:
                _wait(self.heading, timeout)
                header = Header.decode(self.words)
                self._compare(header)
                arrival = header.arrival
                self.count(self.words, sent=False, control=True)
            _wait(self.work, timeout)
            if settings.emulator is not None:
                settings.emulator.wait_until(arrival)
        if self.buffer is not self.tensor:
            self.tensor.copy_(self.buffer)
        self.count(self.buffer, sent=False)
        self.finished = True
        end_transfer()
        return True

    def is_completed(self) -> bool:
        return self.finished

    def _compare(self, sent: Header) -> None:
        wanted = header_of(self.tensor)
        if (sent.dtype, sent.shape) != (wanted.dtype, wanted.shape):
            raise RuntimeError(
                f"{self.name}: rank {self.peer} sends {sent} but rank {dist.get_rank()} expects {wanted}: "
                "give both the same shape and dtype"
            )


def _wait(work: dist.Work | None, timeout: timedelta | None) -> None:
    if work is None:
        return
    if timeout is None:
        work.wait()  # bounded by the group's own timeout
    else:
        work.wait(timeout)
