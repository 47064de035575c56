"""Stages that sleep for their cost instead of computing: many of them fit on few cores, and take their time exactly.

They show what a schedule does with time on more ranks than there are cores. What they compute is trivial, but it has
gradients, so that nothing of the pipeline is left out.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    """The identity; forward and backward take so many seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class SleepingStage(nn.Module):
    """Multiplies its input by one weight, and sleeps: `forward` seconds forward, `backward_input` in the backward for
    its input, `backward_weight` in that for its weight."""

    def __init__(self, forward: float, backward_input: float, backward_weight: float) -> None:
        super().__init__()
        self.seconds = forward, backward_input, backward_weight
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, ...] to the same shape."""
        forward, backward_input, backward_weight = self.seconds
        if not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # the first stage's backward takes as long as any other
        weight: Tensor = _Sleep.apply(self.weight, 0.0, backward_weight)
        return _Sleep.apply(x, forward, backward_input) * weight  # type: ignore[no-any-return]
