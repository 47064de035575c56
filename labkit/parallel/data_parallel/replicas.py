"""Making the ranks' copies of a model equal: shapes compared, values taken from the group's first rank."""

from collections.abc import Iterable

import torch
from torch import nn

from labkit.collectives import broadcast
from labkit.collectives.agreement import agree, describe
from labkit.collectives.groups import Endpoint


def check_same_shapes(module: nn.Module, end: Endpoint) -> None:
    """Raise RuntimeError, naming the first that differs, where two ranks' parameters or buffers differ in shape or
    dtype. Control traffic: one short message a tensor."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    agree(end, f"a model of {len(tensors)} parameters and buffers")
    for name, tensor in tensors.items():
        agree(end, f"{name}: {describe(tensor)}")


def broadcast_tensors(tensors: Iterable[torch.Tensor], end: Endpoint, *, source: int = 0) -> None:
    """Set tensors to those of the group's rank `source`: one broadcast for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        broadcast(flat, group=end.group, group_src=source)
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(part.view(tensor.shape))
