"""A row-parallel product cut into pieces: the sum of one piece is under way while the next one is computed.

The tokens are cut, not the weight, so that every piece is finished when its sum is here. It pays where the network and
the processor are different things: on an emulated network, or with a GPU. Between processes on one machine sending
takes the cores that compute.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.collectives import all_reduce
from labkit.mesh import Axis


class _Reduced(Function):
    """Forward: in the place of the pieces their sums over the ranks. Backward: a copy for each piece."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, *pieces: Tensor) -> Tensor:
        ctx.lengths = [len(piece) for piece in pieces]
        return sums.view_as(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *gradient.split(ctx.lengths)


def row_product_in_pieces(x: Tensor, weight: Tensor, axis: Axis, pieces: int) -> Tensor:
    """The sum over the axis of x W^T; x [..., in], W [out, in], result [..., out]. No bias."""
    rows = x.flatten(0, -2)
    sums, works, products, start = None, [], [], 0
    for piece in rows.tensor_split(min(pieces, max(1, len(rows)))):
        product = F.linear(piece, weight)
        if sums is None:
            sums = product.new_empty(len(rows), len(weight))
        here = sums[start : start + len(piece)]
        here.copy_(product.detach())
        works.append(all_reduce(here, group=axis.group, async_op=True))
        products.append(product)
        start += len(piece)
    for work in works:
        if work is not None:
            work.wait()
    assert isinstance(sums, torch.Tensor)
    result: Tensor = _Reduced.apply(sums, *products)
    return result.view(*x.shape[:-1], len(weight))
