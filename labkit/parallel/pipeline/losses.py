"""How the losses of micro-batches become the gradient of the whole batch's mean.

A micro-batch's mean counts by its share of the rows, not by 1 / M, so that micro-batches of unequal length are exact. A
loss that gives a sum and its weight, samples or valid tokens, is divided by the weight of the whole batch. Where that
is not known before the last micro-batch, the gradients of the sums add up aside and are divided at the end.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from labkit.collectives import all_reduce
from labkit.collectives.groups import Endpoint


class Losses:
    """The last stage's losses in one step. `factors[m]` is what micro-batch m's loss is multiplied by."""

    def __init__(
        self, function: Callable[..., Any], sizes: list[int], *, weighted: bool, weight: float | None, scale: bool
    ) -> None:
        self.function, self.weighted, self.seen_weight = function, weighted, 0.0
        self.last_weight = 1.0  # of the micro-batch seen last
        self.values: list[Any] = []
        if weighted:
            self.factors = [1.0 if weight is None else 1.0 / weight] * len(sizes)
        else:
            self.factors = [rows / sum(sizes) if scale else 1.0 for rows in sizes]

    def of(self, output: Any, target: Any) -> Tensor:
        """The loss of the next micro-batch, to run backward from."""
        value = self.function(output, target)
        pair = isinstance(value, tuple | list) and len(value) == 2
        if self.weighted != pair:
            told = "a pair (sum, weight)" if pair else f"a {type(value).__name__}"
            remedy = "give weighted=True" if pair else "return (sum, weight), or leave weighted out"
            raise TypeError(f"pipeline: loss_fn returns {told} while weighted is {self.weighted}: {remedy}")
        loss = value[0] if pair else value
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError("pipeline: loss_fn must return one number in a tensor: a micro-batch's mean or sum")
        if pair:
            self.last_weight = _checked_weight(value[1])
            self.seen_weight += self.last_weight
            self.values.append((loss.detach(), value[1]))
        else:
            self.values.append(loss.detach())
        return loss

    def refuse_detached(self, output: Any) -> None:
        """Raise RuntimeError where the last loss has no graph though the output has one, and it counts."""
        parts = (
            output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else (output,)
        )
        if self.last_weight and any(isinstance(part, Tensor) and part.requires_grad for part in parts):
            raise RuntimeError(
                "pipeline: what loss_fn returns does not depend on the output for autograd, so that nothing would "
                "learn: compute it from the output, without detach() or item()"
            )


def _checked_weight(given: Any) -> float:
    single = isinstance(given, int | float) or (isinstance(given, Tensor) and given.numel() == 1)
    weight = float(given) if single else math.nan
    if not 0 <= weight < math.inf:
        told = f"{weight:g}" if single else f"a {type(given).__name__}"
        raise ValueError(
            f"pipeline: the weight that loss_fn returns is {told}: give the number of samples or valid tokens"
        )
    return weight


class SetAside:
    """Gradients that were there before the step, put aside so that this step's can be summed or divided alone."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.kept = [(parameter, parameter.grad) for parameter in dict.fromkeys(parameters)]
        for parameter, _ in self.kept:
            parameter.grad = None

    def put_back(self, *, divide_by: float = 1.0) -> None:
        """Divide this step's gradients, and add them to those that were there."""
        for parameter, before in self.kept:
            if parameter.grad is not None and divide_by != 1.0:
                parameter.grad.div_(divide_by)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


def weight_of_all(end: Endpoint, mine: float, device: torch.device) -> float:
    """The batch's weight, which the last stage's rank knows: one all-reduce of one number."""
    total = torch.tensor(mine, dtype=torch.float64, device=device)
    all_reduce(total, group=end.group)
    return float(total)
