"""Parameters that every rank has whole but uses on its shard only: their gradients must be summed, and often are not.

A norm on a shard of the sequence sees a part of the tokens, so that its gradient is that part's. Nothing breaks where
the sum is forgotten: the ranks' copies drift apart, and the loss still falls.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.collectives import all_reduce
from labkit.mesh import Axis


class _SummedGradients(Function):
    """Forward: the parameters as they are. Backward: one all-reduce of all their gradients, side by side."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce(flat, group=ctx.axis.group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return None, *(part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))


def with_summed_gradients(axis: Axis, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """The parameters, for use on a shard: their gradients are summed over the axis, in one all-reduce.

    None stands for a parameter that is not there.
    """
    trained = [one for one in parameters if one is not None and one.requires_grad]
    if axis.size == 1 or not trained:
        return parameters
    ready = iter(_SummedGradients.apply(axis, *trained))
    return tuple(next(ready) if one is not None and one.requires_grad else one for one in parameters)
