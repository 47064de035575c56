"""Sums over a whole model of which each rank holds pieces: what counts on which rank, and over which axes to sum.

Clipping sums powers of gradients, a gradient scaler the infinities it found. Both go wrong if a replicated or tied
parameter counts twice, and hang if ranks don't agree on the collectives.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed import ReduceOp

from labkit.collectives import all_reduce
from labkit.mesh.axes import Axis
from labkit.mesh.placement import Placement


def axes_to_sum(placements: Iterable[Placement], *, more: Iterable[Axis] = ()) -> tuple[Axis, ...]:
    """The axes along which a sum over the model's pieces has to go: those that something is sharded or tied over.

    Sorted by name, so that every rank goes through them in one order. Empty where every rank holds everything.
    """
    sharded: dict[tuple[int, ...], Axis] = {axis.ranks: axis for axis in more}
    tied: dict[tuple[int, ...], Axis] = {}
    for placement in placements:
        sharded.update((axis.ranks, axis) for axis in placement.sharded_over)
        tied.update((axis.ranks, axis) for axis in placement.tied_over)
    for ranks, axis in tied.items():
        # a tie between stages lies on the axis of stages, which is summed over as a whole
        if not any(set(ranks) <= set(others) for others in sharded):
            sharded[ranks] = axis
    axes = sorted((axis for axis in sharded.values() if axis.size > 1), key=lambda axis: (axis.name, axis.ranks))
    for index, axis in enumerate(axes):
        for other in axes[:index]:
            if len(set(axis.ranks) & set(other.ranks)) > 1:
                raise ValueError(
                    f"the axes {other.name!r} {list(other.ranks)} and {axis.name!r} {list(axis.ranks)} have more than "
                    "one rank in common: shard over the axes of one mesh"
                )
    return tuple(axes)


def counts_here(placement: Placement, axes: Iterable[Axis]) -> bool:
    """Whether this rank is the one that contributes its piece to a sum over `axes`: the first that holds it."""
    sharded = {axis.ranks for axis in placement.sharded_over}
    for axis in axes:
        ties = [tie for tie in placement.tied_over if set(tie.ranks) <= set(axis.ranks)]
        if ties:
            first = all(tie.coordinate == 0 for tie in ties)
        else:
            first = axis.ranks in sharded or axis.coordinate == 0
        if not first:
            return False
    return True


def sum_over(axes: Iterable[Axis], value: torch.Tensor, op: Any = ReduceOp.SUM) -> None:
    """Reduce a small tensor along each axis in turn, in place; afterwards all ranks hold the same bits."""
    for axis in axes:
        if axis.group is None:
            raise RuntimeError(f"axis {axis.name!r} has no group here: build its Placement on the ranks themselves")
        all_reduce(value, op, axis.group, algorithm="naive")
