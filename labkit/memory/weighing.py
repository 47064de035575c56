"""What a micro-batch weighs, before its forward: the number of samples or valid tokens that its loss counts.

A loss tells its weight together with its sum, which needs an output. The weight hardly ever does: so the loss is asked
with an output of which nothing is known, and answers if the targets are all that it counts by.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Loss: TypeAlias = Callable[[Any, Any], tuple[Tensor, Any]]


class Unknown:
    """An output that is not there yet. Whatever is computed from it is unknown too; no number or truth comes of it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "Unknown":
        return cls()

    def __getattr__(self, name: str) -> "Unknown":
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown()

    def __call__(self, *args: Any, **kwargs: Any) -> "Unknown":
        return Unknown()

    def __bool__(self) -> bool:
        raise TypeError("an unknown output is neither true nor false")

    def __iter__(self) -> Any:  # or it would go by getitem, for ever
        raise TypeError("nobody knows how long an unknown output is")


_OPERATORS = (
    *("getitem", "neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "mod"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("pow", "rpow", "matmul", "rmatmul"),
)
for _name in _OPERATORS:
    setattr(Unknown, f"__{_name}__", lambda self, *_: Unknown())


def weigh(
    forward: Callable[[Any], Any],
    part: tuple[Any, Any],
    loss: Loss,
    weight: Callable[[Any], Any] | None,
    number: int,
) -> float:
    """The weight of micro-batch `number`: by `weight`, else by asking `loss`, without an output if it can do so."""
    inputs, targets = part
    if weight is not None:
        return _number(weight(targets), "weight()", number)
    try:
        told = checked_pair(loss(Unknown(), targets), number)[1]
    except Exception:  # what it can't do without an output, or can't do at all, which the forward will show
        told = Unknown()
    if isinstance(told, Unknown):
        told = checked_pair(_without_gradient(forward, inputs, targets, loss), number)[1]
    return _number(told, "loss()", number)


def checked_pair(given: Any, number: int) -> tuple[Tensor, Any]:
    """What a loss returned for micro-batch `number`, or a TypeError where it is no pair."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        what = f"{len(given)} things" if isinstance(given, tuple | list) else f"a {type(given).__name__}"
        raise TypeError(
            f"accumulate: loss(output, targets) returned {what} for micro-batch {number}: it must return the sum of "
            "the losses and its weight, the number of samples or valid tokens"
        )
    return given[0], given[1]


def _without_gradient(forward: Callable[[Any], Any], inputs: Any, targets: Any, loss: Loss) -> Any:
    """The loss after a forward that leaves no trace: no statistics, no random numbers, no graph."""
    modules = list(forward.modules()) if isinstance(forward, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        with torch.no_grad():
            return loss(forward(inputs), targets)
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _number(told: Any, by: str, number: int) -> float:
    single = isinstance(told, int | float) or (isinstance(told, Tensor) and told.numel() == 1)
    value = float(told) if single else float("nan")
    if not 0 <= value < float("inf"):
        what = f"{value:g}" if single else f"a {type(told).__name__}"
        raise ValueError(
            f"accumulate: the weight that {by} gives for micro-batch {number} is {what}: give the number of samples or "
            "valid tokens"
        )
    return value
