"""The naive collectives: one rank talks to all others, one after the other.

Simple, and the yardstick that the better ones are held against: of an all-reduce of n bytes over N ranks, the rank in
the middle receives (N - 1) n bytes and sends as many.
"""

from typing import Any

import torch
import torch.distributed as dist

from labkit.collectives.calls import operation
from labkit.collectives.groups import Group, global_rank, resolve
from labkit.collectives.point_to_point import isend, recv, send
from labkit.collectives.reductions import combine, divide


def broadcast(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, *, group_src: int | None = None
) -> None:
    """Copy `tensor` of the global rank `src` into `tensor` of every rank of the group. It sends (N - 1) n bytes."""
    world = resolve(group)
    root = global_rank(world, src, group_src, "src")
    with operation("broadcast", world, bytes=tensor.numel() * tensor.element_size()):
        if dist.get_rank() == root:
            others = [rank for rank in dist.get_process_group_ranks(world) if rank != root]
            for work in [isend(tensor, rank, world) for rank in others]:
                work.wait()
        else:
            recv(tensor, root, world)


def naive_all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Gather all tensors on the group's first rank, reduce them there in rank order, and broadcast the result.

    Every rank gets the same bits, whatever the world size: the sum is always ((x0 + x1) + x2) + ...
    """
    first, *others = dist.get_process_group_ranks(group)
    if dist.get_rank() == first:
        total = tensor.detach().clone()
        part = torch.empty_like(total)
        for rank in others:
            recv(part, rank, group)
            combine(total, part, op)
        divide(total, op, 1 + len(others))
        tensor.detach().copy_(total)
    else:
        send(tensor, first, group)
    broadcast(tensor, first, group)


def barrier(group: Group = None) -> None:
    """Return when every rank of the group has called it. One byte each way with the group's first rank, counted as
    control traffic."""
    world = resolve(group)
    first, *others = dist.get_process_group_ranks(world)
    token = torch.zeros(1, dtype=torch.uint8)
    with operation("barrier", world, control=True):
        if dist.get_rank() == first:
            for rank in others:
                recv(token, rank, world)
            for rank in others:
                send(token, rank, world)
        else:
            send(token, first, world)
            recv(token, first, world)
