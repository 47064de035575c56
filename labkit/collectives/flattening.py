"""Tensors as flat contiguous ones, which is what the algorithms work on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def size_of(tensor: torch.Tensor) -> int:
    """The bytes of what a tensor shows."""
    return tensor.numel() * tensor.element_size()


@contextmanager
def flat_view(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor as a flat contiguous one, whose changes are the tensor's when the block ends without an error."""
    plain = tensor.detach()
    flat = plain.reshape(-1) if plain.is_contiguous() else plain.contiguous().reshape(-1)
    yield flat
    if not plain.is_contiguous():
        plain.copy_(flat.view(plain.shape))
