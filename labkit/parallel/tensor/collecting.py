"""The whole of what is cut: gathered to a plain state_dict, and cut again for another number of ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from labkit.collectives.calls import operation
from labkit.collectives.groups import endpoint
from labkit.mesh import Placement, gradient_of, placement_of
from labkit.parallel.tensor.dims import gathered_along


def full_tensor(piece: Tensor, placement: Placement) -> Tensor:
    """The global tensor of which `piece` is this rank's slice; the ranks it is sharded over call it together."""
    full = piece.detach()
    for axis in reversed(placement.sharded_over):
        if axis.size == 1:
            continue
        dims = [dim for dim, size in enumerate(placement.shape) if full.shape[dim] != size] or [0]
        end = endpoint(axis.group)
        with operation("state", end, control=True):
            full = gathered_along(full, dims[0], axis, placement.shape[dims[0]])
    return full


def full_params(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter whole, by name, on every rank."""
    return {name: full_tensor(one, placement_of(one)) for name, one in module.named_parameters()}


def full_grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Every gradient whole, by name, on every rank; None where there is none."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters():
        gradient, placement = gradient_of(parameter)
        found[name] = None if gradient is None else full_tensor(gradient, placement)
    return found


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """The whole model's state on the CPU, by the names of its own `state_dict`: what a plain module loads.

    All ranks of the axis call it together, and each gets all of it.
    """
    whole: dict[int, Tensor] = {}
    state = module.state_dict(keep_vars=True)
    for tensor in state.values():
        if id(tensor) not in whole:
            whole[id(tensor)] = full_tensor(tensor, placement_of(tensor)).cpu()
    return {name: whole[id(tensor)].clone() for name, tensor in state.items()}


def load_full_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a plain state_dict into a shared module: each rank takes its slices, whatever number of ranks saved it.

    Raises ValueError where a name is missing or left over, or a shape is another one.
    """
    own = module.state_dict(keep_vars=True)
    missing, more = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or more:
        what = f"lacks {missing[0]}" if missing else f"has {more[0]}, which the module lacks"
        raise ValueError(f"load_full_state: the state {what}: was another model saved?")
    for name, tensor in own.items():
        placement = placement_of(tensor)
        if tuple(state[name].shape) != placement.shape:
            raise ValueError(
                f"load_full_state: {name} has shape {list(state[name].shape)}, not {list(placement.shape)}: load the "
                "whole tensor, not a slice"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(placement_of(tensor).take(state[name]))
