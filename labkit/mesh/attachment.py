"""Where Placements live: on the parameter itself, put there by the technique that cut it.

A parameter without one is whole, and replicated over all ranks that train the model: plain PyTorch, and data parallel.
A technique that keeps a parameter whole but its reduced gradient in pieces (ZeRO stages 1 and 2) says so too, so that
clipping finds the pieces. A deep copy of a parameter does not take its Placement along.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from labkit.mesh.placement import Placement

_NAME = "_labkit_placement"


@dataclass(frozen=True)
class Gradient:
    """A gradient that is not in `parameter.grad`: how this rank's piece is read, and where it belongs."""

    read: Callable[[], torch.Tensor | None]
    placement: Placement


@dataclass(frozen=True)
class FlatPart:
    """A piece that lies in a longer flat tensor, as in an optimizer which steps one flat shard over many parameters.

    Elements `start` to `start + placement.numel` of the flattened `tensor` are the piece.
    """

    tensor: torch.Tensor
    start: int
    placement: Placement

    def __post_init__(self) -> None:
        stop = self.start + self.placement.numel
        if self.start < 0 or stop > self.tensor.numel():
            raise ValueError(f"FlatPart: elements {self.start} to {stop} of a tensor of {self.tensor.numel()}")


@dataclass(frozen=True)
class _Attached:
    placement: Placement
    gradient: Gradient | None


def place(parameter: torch.Tensor, placement: Placement, *, gradient: Gradient | None = None) -> None:
    """Attach `placement` to a parameter, buffer or shard; a second call replaces it. `gradient` where `.grad` is not
    what this rank contributes. Techniques call this."""
    setattr(parameter, _NAME, _Attached(placement, gradient))


def placement_of(parameter: torch.Tensor) -> Placement:
    """The Placement attached to a parameter; whole and replicated if there is none."""
    attached: _Attached | None = getattr(parameter, _NAME, None)
    return Placement.of(parameter) if attached is None else attached.placement


def placements_of(module: nn.Module) -> dict[str, Placement]:
    """The Placement of every parameter of the module by name; a parameter with two names under the first."""
    return {name: placement_of(parameter) for name, parameter in module.named_parameters()}


def gradient_of(parameter: torch.Tensor) -> tuple[torch.Tensor | None, Placement]:
    """This rank's piece of a parameter's gradient, None if it has none, and its Placement."""
    attached: _Attached | None = getattr(parameter, _NAME, None)
    if attached is not None and attached.gradient is not None:
        return attached.gradient.read(), attached.gradient.placement
    return parameter.grad, placement_of(parameter)
