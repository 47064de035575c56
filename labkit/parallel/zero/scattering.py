"""Reduce-scatter of gradients: each rank gets the sum of its part. Two ways, which differ in the order of the sum.

Both send K (N - 1) / N elements of K a rank.
"""

import torch

from labkit.collectives import ReduceOp, Work, all_to_all_single, reduce_scatter_tensor
from labkit.collectives.groups import Endpoint

ALGORITHMS = ("ring", "naive")


def reduce_scatter(
    output: torch.Tensor, flat: torch.Tensor, end: Endpoint, *, algorithm: str, async_op: bool = False
) -> Work | None:
    """Sum `flat` over the group into `output`, this rank's part of it. Returns the work in the background, or None
    where it is done.

    "ring" sums part r in the order of ranks r + 1, ..., r. "naive" sends every part straight to its rank, which sums
    in rank order, as the naive all-reduce does: bit for bit its result. It holds all N parts while it sums.
    """
    if algorithm == "ring":
        return reduce_scatter_tensor(output, flat, ReduceOp.SUM, end.group, async_op)
    parts = torch.empty_like(flat)
    all_to_all_single(parts, flat, group=end.group)
    first, *others = parts.view(end.size, -1)
    output.copy_(first)
    for part in others:
        output.add_(part)
    return None
