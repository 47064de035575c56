"""Marks on the parameters of a wrapped module: that their gradients are averaged, and by whom they are held."""

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from labkit.mesh import Axis, Placement, place, placement_of

#: parameters under a wrapper, so that a second one, or an optimizer that reduces by itself, can refuse them
_wrapped = WeakTensorKeyDictionary()

Placed = list[tuple[torch.Tensor, Placement, Placement]]  # a parameter, its placement before, and under the wrapper


def is_wrapped(parameter: torch.Tensor) -> bool:
    """Whether a living DistributedDataParallel averages this parameter's gradient."""
    return parameter in _wrapped


def claim(parameter: torch.Tensor) -> None:
    """Mark a parameter whose gradient somebody reduces."""
    _wrapped[parameter] = True


def disclaim(parameter: torch.Tensor) -> None:
    """Take the mark away."""
    _wrapped.pop(parameter, None)


def mark(module: nn.Module, axis: Axis) -> Placed:
    """Every parameter is held by all ranks of the axis; those that are trained are wrapped."""
    placed: Placed = []
    for parameter in module.parameters():
        before = placement_of(parameter)
        placed.append((parameter, before, before.replicated(axis)))
        place(parameter, placed[-1][2])
        if parameter.requires_grad:
            _wrapped[parameter] = True
    return placed


def unmark(placed: Placed) -> None:
    """Take the marks away again, where they are still ours."""
    for parameter, before, ours in placed:
        _wrapped.pop(parameter, None)
        if placement_of(parameter) == ours:
            place(parameter, before)
