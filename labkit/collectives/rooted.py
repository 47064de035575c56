"""`broadcast` and `reduce`: from one rank to all, and from all to one. And `barrier`, which carries nothing."""

from typing import Any

import torch
from torch.distributed import ReduceOp

from labkit.collectives.agreement import BARRIER_TAG, agree, collective
from labkit.collectives.background import perform
from labkit.collectives.calls import operation
from labkit.collectives.flattening import flat_view, size_of
from labkit.collectives.groups import Group, endpoint, place_of
from labkit.collectives.messages import Receiving, Sending, Work
from labkit.collectives.naive import naive_broadcast, naive_reduce
from labkit.collectives.reductions import check_op, name_of_op
from labkit.collectives.tree import tree_broadcast, tree_reduce

BROADCASTS = {"naive": naive_broadcast, "tree": tree_broadcast}
REDUCES = {"naive": naive_reduce, "tree": tree_reduce}


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: str = "tree",
) -> Work | None:
    """Copy `tensor` of the global rank `src` (or the group's rank `group_src`) into that of every rank of the group.

    All send (N - 1) n bytes together; with "naive" all of them leave the source.
    """
    if algorithm not in BROADCASTS:
        raise ValueError(f"broadcast: algorithm {algorithm!r} is not known; give one of {sorted(BROADCASTS)}")
    end = endpoint(group)
    root = place_of(end, src, group_src, "src")

    def run() -> None:
        how = (f"src={end.members[root]}", algorithm)
        with collective(end, "broadcast", tensor, *how, bytes=size_of(tensor), algorithm=algorithm):
            if end.size > 1:
                with flat_view(tensor) as flat:
                    BROADCASTS[algorithm](flat, root, end)

    return perform(run, end, async_op=async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    algorithm: str = "tree",
) -> Work | None:
    """Reduce `tensor` over the group into `tensor` of the global rank `dst` (or the group's rank `group_dst`).

    The other ranks' tensors keep their values (torch.distributed leaves them undefined). `op` as for `all_reduce`.
    """
    if algorithm not in REDUCES:
        raise ValueError(f"reduce: algorithm {algorithm!r} is not known; give one of {sorted(REDUCES)}")
    check_op(op, tensor)
    end = endpoint(group)
    root = place_of(end, dst, group_dst, "dst")

    def run() -> None:
        how = (f"dst={end.members[root]}", name_of_op(op), algorithm)
        with collective(end, "reduce", tensor, *how, bytes=size_of(tensor), algorithm=algorithm):
            if end.size > 1:
                with flat_view(tensor) as flat:
                    REDUCES[algorithm](flat, op, root, end)

    return perform(run, end, async_op=async_op)


def barrier(group: Group = None) -> None:
    """Return when every rank of the group has called it. One byte from each rank to the group's first and one back,
    counted as control traffic."""
    end = endpoint(group)

    def run() -> None:
        token = torch.zeros(1, dtype=torch.uint8, device="cuda" if end.nccl else "cpu")
        with operation("barrier", end, control=True):
            agree(end, "barrier()")
            if end.place == 0:
                for place in range(1, end.size):
                    Receiving(end, token, place, BARRIER_TAG, headed=False).wait()
                for work in [Sending(end, token, place, BARRIER_TAG, headed=False) for place in range(1, end.size)]:
                    work.wait()
            else:
                Sending(end, token, 0, BARRIER_TAG, headed=False).wait()
                Receiving(end, token, 0, BARRIER_TAG, headed=False).wait()
        token.item()  # on a GPU what was waited for is only queued

    perform(run, end, async_op=False)
