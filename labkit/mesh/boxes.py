"""Boxes: rectangular blocks of a tensor, and how a range of a flattened block falls apart into them.

A box has one (start, stop) for each dim. A flat range of a block in row-major order is a partial first row, whole rows,
and a partial last row, where the partial ones are again ranges of a block with one dim less. So a rank's piece,
however it was cut, is a list of boxes whose elements follow one another in its memory.
"""

import math
from typing import TypeAlias

import torch

Range: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[Range, ...]


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def cut(block: Box, start: int, stop: int) -> list[Box]:
    """The boxes that elements `start` to `stop` of the flattened block consist of, in the order of memory."""
    if start >= stop:
        return []
    if not block:
        return [()]
    (top, _), rest = block[0], block[1:]
    row = math.prod(sizes(rest))
    (first, left), (last, right) = divmod(start, row), divmod(stop, row)
    if first == last:
        return [((top + first, top + first + 1), *inner) for inner in cut(rest, left, right)]
    found: list[Box] = []
    if left:
        found += [((top + first, top + first + 1), *inner) for inner in cut(rest, left, row)]
        first += 1
    if last > first:
        found.append(((top + first, top + last), *rest))
    if right:
        found += [((top + last, top + last + 1), *inner) for inner in cut(rest, 0, right)]
    return found


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share, None if nothing."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def views(flat: torch.Tensor, boxes: list[Box]) -> list[torch.Tensor]:
    """The parts of a piece's flattened memory that its boxes take, each in the shape of its box."""
    found, offset = [], 0
    for box in boxes:
        count = math.prod(sizes(box))
        found.append(flat[offset : offset + count].view(sizes(box)))
        offset += count
    return found


def within(view: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The `part` of `box`, of which `view` holds the elements."""
    return view[tuple(slice(a - start, b - start) for (start, _), (a, b) in zip(box, part, strict=True))]
