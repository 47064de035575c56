"""A module's parameters and buffers as placed tensors for a snapshot, and back."""

import torch
from torch import nn

from labkit.mesh import Placement, placement_of
from labkit.train.snapshot_reading import Snapshot


def module_tensors(module: nn.Module, *, prefix: str = "model.") -> dict[str, tuple[torch.Tensor, Placement]]:
    """Every parameter and persistent buffer by name, with its Placement. A tied one comes once, under its first name.

    A buffer without a Placement is taken to be the same on all ranks that have it.
    """
    return {prefix + name: (tensor.detach(), placement_of(tensor)) for name, tensor in _named(module).items()}


def load_module(module: nn.Module, snapshot: Snapshot, *, prefix: str = "model.") -> None:
    """Read this rank's piece of every parameter and persistent buffer from a snapshot, in place."""
    with torch.no_grad():
        for name, tensor in _named(module).items():
            tensor.copy_(snapshot.read(prefix + name, placement_of(tensor)))


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    persistent = set(module.state_dict(keep_vars=True))
    found.update((name, buffer) for name, buffer in module.named_buffers() if name in persistent)
    return found
