"""`all_reduce`: one name, several algorithms, all made of send and receive."""

from typing import Any

import torch
from torch.distributed import ReduceOp

from labkit.collectives.calls import operation
from labkit.collectives.groups import Group, resolve
from labkit.collectives.naive import naive_all_reduce
from labkit.collectives.reductions import check_op
from labkit.collectives.ring import ring_all_reduce

ALGORITHMS = {"naive": naive_all_reduce, "ring": ring_all_reduce}


def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "ring",
) -> None:
    """Reduce `tensor` over the group, in place, so that every rank holds the same result to the last bit.

    Args:
        tensor: any shape and stride, the same shape and dtype on every rank.
        op: ReduceOp.SUM, AVG, PRODUCT, MAX or MIN.
        group: the ranks that take part; None means the world.
        async_op: not available yet.
        algorithm: "ring" or "naive".
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"all_reduce: algorithm {algorithm!r} is not known; give one of {sorted(ALGORITHMS)}")
    if async_op:
        raise NotImplementedError("all_reduce: async_op=True is not available yet; call it without")
    check_op(op, tensor)
    chosen = resolve(group)
    nbytes = tensor.numel() * tensor.element_size()
    with operation("all_reduce", chosen, bytes=nbytes, algorithm=algorithm), torch.no_grad():
        ALGORITHMS[algorithm](tensor, op, chosen)
