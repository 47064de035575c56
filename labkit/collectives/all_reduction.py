"""`all_reduce`: one name, several algorithms, all made of send and receive."""

from typing import Any

import torch
from torch.distributed import ReduceOp

from labkit.collectives.agreement import collective
from labkit.collectives.background import perform
from labkit.collectives.flattening import flat_view, size_of
from labkit.collectives.groups import Group, endpoint
from labkit.collectives.halving_doubling import halving_doubling_all_reduce
from labkit.collectives.messages import Work
from labkit.collectives.naive import naive_all_reduce
from labkit.collectives.reductions import check_op, name_of_op
from labkit.collectives.ring import ring_all_reduce
from labkit.collectives.tree import tree_all_reduce

ALGORITHMS = {
    "naive": naive_all_reduce,
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}


def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "ring",
) -> Work | None:
    """Reduce `tensor` over the group, in place, so that every rank holds the same result to the last bit.

    Args:
        tensor: any shape and stride, the same shape and dtype on every rank.
        op: ReduceOp.SUM, AVG, PRODUCT, MAX or MIN.
        group: the ranks that take part; None means the world.
        async_op: return a work object at once; `wait()` for it before touching the tensor.
        algorithm: "ring", "tree", "halving_doubling" or "naive". They differ in bytes, messages, and in the order of
            the sum (each states its own), not in what is summed.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"all_reduce: algorithm {algorithm!r} is not known; give one of {sorted(ALGORITHMS)}")
    check_op(op, tensor)
    end = endpoint(group)

    def run() -> None:
        how = (name_of_op(op), algorithm)
        with collective(end, "all_reduce", tensor, *how, bytes=size_of(tensor), algorithm=algorithm):
            if end.size > 1:
                with flat_view(tensor) as flat:
                    ALGORITHMS[algorithm](flat, op, end)

    return perform(run, end, async_op=async_op)
