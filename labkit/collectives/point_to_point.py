"""`send`, `recv`, `isend`, `irecv`: the only two things that ranks can do. All collectives are made of them.

Semantics and names are torch.distributed's. Added: every message is recorded, shape and dtype are checked between
the ranks, and an emulated network delays the delivery.
"""

import torch

from labkit.collectives.calls import operation
from labkit.collectives.groups import Endpoint, Group, endpoint, place_of
from labkit.collectives.headers import MAX_TAG, header_of
from labkit.collectives.messages import Receiving, Sending, Work
from labkit.collectives.settings import settings


def isend(
    tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, *, group_dst: int | None = None
) -> Work:
    """Start sending `tensor` to the global rank `dst` (or the group's rank `group_dst`); it must not change until
    `wait()` returns. Any shape, dtype and stride."""
    end = endpoint(group)
    place = _checked(end, tensor, place_of(end, dst, group_dst, "dst"), tag, "dst")
    return Sending(end, tensor.detach().contiguous(), place, tag, headed=settings.check)


def irecv(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, *, group_src: int | None = None
) -> Work:
    """Start receiving into `tensor` from the global rank `src` (or the group's rank `group_src`). `wait()` raises a
    RuntimeError that names both sides where the shape or dtype sent is another. Waits are meant in the order of the
    receives."""
    end = endpoint(group)
    place = _checked(end, tensor, place_of(end, src, group_src, "src"), tag, "src")
    return Receiving(end, tensor.detach(), place, tag, headed=settings.check)


def send(
    tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, *, group_dst: int | None = None
) -> None:
    """Send `tensor` to the global rank `dst` and wait until it has left. See `isend`."""
    with operation("send", endpoint(group)):
        isend(tensor, dst, group, tag, group_dst=group_dst).wait()


def recv(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, *, group_src: int | None = None
) -> int:
    """Receive into `tensor` from the global rank `src`, wait for it, and return `src`. See `irecv`."""
    end = endpoint(group)
    with operation("recv", end):
        irecv(tensor, src, group, tag, group_src=group_src).wait()
    return end.members[place_of(end, src, group_src, "src")]


def _checked(end: Endpoint, tensor: torch.Tensor, place: int, tag: int, what: str) -> int:
    if place == end.place:
        rank = end.members[place]
        raise ValueError(f"{what} is rank {rank} itself: a rank can't send to itself, copy the tensor instead")
    if not 0 <= tag < MAX_TAG:
        raise ValueError(f"tag is {tag}; give one from 0 to {MAX_TAG - 1}")
    header_of(tensor)  # refuses what can't be sent
    return place
