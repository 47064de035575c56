"""Tensors as flat contiguous ones, which is what the algorithms work on."""

import torch


def size_of(tensor: torch.Tensor) -> int:
    """The bytes of what a tensor shows."""
    return tensor.numel() * tensor.element_size()


class flat_view:  # used as a function
    """The tensor as a flat contiguous one without a graph, whose changes are the tensor's when the block has ended."""

    __slots__ = ("flat", "plain")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.plain = tensor.detach()

    def __enter__(self) -> torch.Tensor:
        self.flat = self.plain.contiguous().view(-1)
        return self.flat

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and not self.plain.is_contiguous():
            self.plain.copy_(self.flat.view(self.plain.shape))
