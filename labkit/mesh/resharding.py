"""From one placement to another: copying what two pieces of the same global tensor have in common."""

import math
from collections import defaultdict
from itertools import combinations, pairwise, product

import torch

from labkit.mesh.boxes import Box, Range, cut, intersection, views, within
from labkit.mesh.placement import Placement


def copy_overlap(target: torch.Tensor, to: Placement, source: torch.Tensor, held: Placement) -> int:
    """Copy the elements that piece `source`, placed as `held`, has in common with piece `target`, placed as `to`.

    Both are contiguous, of their placements' local shapes; `target` is changed in place. Returns how many elements.
    """
    if to.shape != held.shape:
        raise ValueError(
            f"copy_overlap: pieces of different tensors, of shapes {list(held.shape)} and {list(to.shape)}"
        )
    copied = 0
    to_boxes, held_boxes = to.boxes, held.boxes
    targets = views(target.detach().view(-1), to_boxes)
    sources = views(source.detach().view(-1), held_boxes)
    for box, view in zip(to_boxes, targets, strict=True):
        for other_box, other_view in zip(held_boxes, sources, strict=True):
            common = intersection(box, other_box)
            if common is not None:
                part = within(view, box, common)
                part.copy_(within(other_view, other_box, common))
                copied += part.numel()
    return copied


def partition_fault(pieces: list[Placement]) -> str | None:
    """What keeps these pieces from making up their tensor, each element once; None if they do."""
    if not pieces:
        return "no rank holds it"
    if len({(piece.shape, piece.dtype) for piece in pieces}) > 1:
        told = sorted({f"{str(piece.dtype).removeprefix('torch.')} {list(piece.shape)}" for piece in pieces})
        return f"the ranks disagree about its shape or dtype: {' and '.join(told)}"
    overlap = _overlap(pieces)
    if overlap is not None:
        return f"pieces overlap at {list(overlap)}"
    held, whole = sum(piece.numel for piece in pieces), math.prod(pieces[0].shape)
    return None if held == whole else f"its pieces hold {held} of its {whole} elements"


def _overlap(pieces: list[Placement]) -> Box | None:
    """A block that two pieces have in common. Flat ranges of one block, of which there may be many, are compared in
    order only."""
    alike: dict[tuple[Range, ...], list[tuple[Range, Placement]]] = defaultdict(list)
    for piece in pieces:
        if piece.numel:
            alike[piece.slices].append((piece.flat or (0, math.prod(piece.block)), piece))
    for slices, ranges in alike.items():
        ranges.sort(key=lambda one: one[0])
        for ((_, end), _), ((begin, stop), _) in pairwise(ranges):
            if begin < end:
                return cut(slices, begin, min(end, stop))[0]
    for (block, some), (other, more) in combinations(alike.items(), 2):
        if intersection(block, other) is None:
            continue
        for (_, one), (_, two) in product(some, more):
            for box, other_box in product(one.boxes, two.boxes):
                if (common := intersection(box, other_box)) is not None:
                    return common
    return None
