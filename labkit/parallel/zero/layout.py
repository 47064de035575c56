"""Flat shards: tensors end to end in one flat tensor, padded, and cut into equal parts across their borders.

Every rank's part has the same length, to the element: balance does not depend on how large the tensors are. Source:
S. Rajbhandari and others, ZeRO (SC20), arXiv:1910.02054, section 5.1: partitions of equal size.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

#: where PyTorch's allocator begins a tensor. Matrix products may sum in another order where one begins elsewhere.
ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """The elements `start` to `stop` of a flattened tensor lie in a part, from its element `at` on."""

    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Where tensors of these `shapes` lie in a flat tensor that is cut into `parts`.

    Each begins at a multiple of `align` elements. Those whose size is one come first, so that with at most one other
    there are no gaps. The flat tensor has `length` elements, and each part `part_length`: besides the gaps, at most
    `parts` - 1 are padding, at the end.
    """

    shapes: tuple[tuple[int, ...], ...]
    parts: int
    align: int = 1

    @staticmethod
    def of(tensors: Iterable[torch.Tensor], parts: int) -> "FlatLayout":
        """The layout of these tensors, of one dtype."""
        given = list(tensors)
        align = max(1, ALIGNMENT // given[0].element_size()) if given else 1
        return FlatLayout(tuple(tuple(tensor.shape) for tensor in given), parts, align)

    @cached_property
    def numels(self) -> list[int]:
        """Elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def order(self) -> list[int]:
        """The tensors' indices in the order in which they lie."""
        return sorted(range(len(self.shapes)), key=lambda index: self.numels[index] % self.align != 0)

    @cached_property
    def starts(self) -> list[int]:
        """The first element of each tensor in the flat one."""
        found, end = [0] * len(self.shapes), 0
        for index in self.order:
            found[index] = -(-end // self.align) * self.align
            end = found[index] + self.numels[index]
        return found

    @cached_property
    def end(self) -> int:
        """Where the last tensor ends."""
        last = self.order[-1] if self.order else None
        return 0 if last is None else self.starts[last] + self.numels[last]

    @property
    def part_length(self) -> int:
        """Elements of a part."""
        return -(-self.end // self.parts)

    @property
    def length(self) -> int:
        """Elements of the flat tensor, gaps and padding included."""
        return self.parts * self.part_length

    @property
    def padding(self) -> int:
        """Elements that belong to no tensor."""
        return self.length - sum(self.numels)

    def piece(self, index: int, part: int) -> Piece:
        """What of tensor `index` lies in `part`; nothing, at an end of it, where that is so."""
        begin, end = self.starts[index], self.starts[index] + self.numels[index]
        low, high = part * self.part_length, (part + 1) * self.part_length
        first, last = max(begin, low), min(end, high)
        if first < last:
            return Piece(first - begin, last - begin, first - low)
        edge = 0 if begin >= high else self.numels[index]
        return Piece(edge, edge, min(max(begin - low, 0), self.part_length))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor as a view of the flat one."""
        return [
            flat[start : start + numel].view(shape)
            for start, numel, shape in zip(self.starts, self.numels, self.shapes, strict=True)
        ]

    def part(self, flat: torch.Tensor, part: int) -> torch.Tensor:
        """A part of the flat tensor, as a view."""
        return flat[part * self.part_length : (part + 1) * self.part_length]

    def clear_padding(self, flat: torch.Tensor) -> None:
        """Zero what belongs to no tensor."""
        end = 0
        for index in self.order:
            if end < self.starts[index]:
                flat[end : self.starts[index]].zero_()
            end = self.starts[index] + self.numels[index]
        if end < self.length:
            flat[end:].zero_()

    def fill(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors to their places, and zero the padding."""
        with torch.no_grad():
            for view, tensor in zip(self.views(flat), tensors, strict=True):
                view.copy_(tensor)
            self.clear_padding(flat)
