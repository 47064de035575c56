"""The whole of what is held in pieces: full parameters, gradients and state, for checks and for the end of a run."""

from collections.abc import Iterable

import torch
from torch import nn

from labkit.collectives import ReduceOp, all_reduce
from labkit.mesh import Axis, Placement, gradient_of, placement_of


def full_tensor(piece: torch.Tensor | None, placement: Placement, device: torch.device) -> torch.Tensor | None:
    """The global tensor of which `piece` is this rank's part; the ranks that it is sharded over call it together.

    None where no rank has a piece.
    """
    axes = [axis for axis in placement.sharded_over if axis.size > 1]
    if piece is not None and not axes:
        return piece.detach().view(placement.shape)
    there = torch.tensor(piece is not None, dtype=torch.uint8, device=device)
    _over(axes, there, ReduceOp.MAX)
    if not there:
        return None
    full = torch.zeros(placement.shape, dtype=placement.dtype, device=device)
    if piece is not None:
        placement.put(full, piece.detach().view(placement.local_shape))
    _over(axes, full, ReduceOp.SUM)
    return full


def full_params(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, by name, on every rank."""
    return {name: _whole(parameter) for name, parameter in module.named_parameters()}


def full_grads(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Every averaged gradient whole, by name, on every rank; None where no rank has any."""
    return {
        name: full_tensor(*gradient_of(parameter), parameter.device) if parameter.requires_grad else None
        for name, parameter in module.named_parameters()
    }


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The whole model's state on the CPU, by the names of its own `state_dict`: what a plain module loads."""
    parameters = {id(parameter): _whole(parameter) for parameter in module.parameters()}
    return {
        name: parameters.get(id(value), value).detach().cpu().clone()
        for name, value in module.state_dict(keep_vars=True).items()
    }


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    full = full_tensor(parameter, placement_of(parameter), parameter.device)
    assert full is not None
    return full


def _over(axes: Iterable[Axis], tensor: torch.Tensor, op: ReduceOp.RedOpType) -> None:
    for axis in axes:
        all_reduce(tensor, op, axis.group)
