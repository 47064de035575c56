"""Kahan summation: what an addition in 16 bits loses is kept in 16 bits of its own, and added with the next.

It needs 2 bytes a parameter where master weights need 4. Sources: Kahan, Further Remarks on Reducing Truncation Errors,
CACM 8(1), 1965; for weights: Zamirai and others, Revisiting BFloat16 Training, arXiv:2010.06192, algorithm 1.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


@torch.no_grad()
def kahan_add_(total: torch.Tensor, addend: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """Add `addend` to `total` in place, in `total`'s dtype; returns `total`.

    `lost` (of its shape and dtype, zeros at first) holds what earlier additions have lost, and is changed in place.
    """
    wanted = addend.to(total.dtype) + lost
    before = total.clone()
    total.add_(wanted)
    # what of `wanted` has arrived is exactly the difference; the rest waits for the next addition
    lost.copy_(wanted - (total - before))
    return total


class KahanSGD(Optimizer):
    """Stochastic gradient descent as torch.optim.SGD, whose updates add up by Kahan summation.

    Args:
        params: parameters of any floating-point dtype, bfloat16 above all.
        lr: the learning rate.
        momentum: of the velocity, which is kept in the parameter's dtype.
        weight_decay: added to the gradient, times the weight.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0):
            raise ValueError(
                f"KahanSGD: lr={lr}, momentum={momentum}, weight_decay={weight_decay}; give numbers of 0 or more, and "
                "a momentum below 1"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("KahanSGD.step: takes no closure; compute the gradients before")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        direction = parameter.grad
        assert direction is not None
        if group["weight_decay"]:
            direction = direction.add(parameter, alpha=group["weight_decay"])
        if group["momentum"]:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            direction = state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
        if "lost" not in state:
            state["lost"] = torch.zeros_like(parameter)
        kahan_add_(parameter, direction * -group["lr"], state["lost"])
