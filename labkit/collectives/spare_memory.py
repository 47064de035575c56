"""Buffers in which a group's collectives let pieces arrive, kept from call to call: fresh memory costs a page fault
every few kilobytes, which takes longer than what arrives in it.

Collectives of one group run one after the other, so they can share them.
"""

import torch

from labkit.collectives.groups import Endpoint

_buffers: dict[tuple[Endpoint, torch.device, int], torch.Tensor] = {}


def spare(end: Endpoint, number: int, like: torch.Tensor) -> torch.Tensor:
    """The group's spare buffer of that number, as a flat tensor of the length, dtype and device of the flat `like`.
    Its values are what was left in it."""
    key, nbytes = (end, like.device, number), like.numel() * like.element_size()
    found = _buffers.get(key)
    if found is None or found.numel() < nbytes:
        found = _buffers[key] = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
    return found[:nbytes].view(like.dtype)


def forget_spare() -> None:
    """Called when the groups are built anew."""
    _buffers.clear()
