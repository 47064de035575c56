"""What a stage passes on: for each tensor its shape, dtype, and whether a gradient comes back for it.

The next stage learns it once for each size of micro-batch, before the first of that size arrives. Control traffic.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.collectives.calls import operation
from labkit.collectives.groups import Endpoint
from labkit.collectives.headers import Header, header_of
from labkit.collectives.messages import Receiving, Sending

_WORDS = 14  # a header, and whether a gradient comes back


class Shape(NamedTuple):
    """One tensor between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiated: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def shapes_of(tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    """Those of these tensors."""
    return tuple(Shape(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors)


def as_tensors(output: Any, stage: int) -> tuple[Tensor, ...]:
    """What a stage returned as the tensors that go to the next stage, whose inputs they are in this order."""
    parts = tuple(output) if isinstance(output, tuple | list) else (output,)
    for number, part in enumerate(parts):
        if not isinstance(part, Tensor):
            raise TypeError(
                f"pipeline: stage {stage} returns a {type(part).__name__} as output {number}; between stages only "
                "tensors travel, one or a tuple of them"
            )
    return parts


def send_shapes(end: Endpoint, shapes: Sequence[Shape], place: int, tag: int) -> list[Sending]:
    """Two messages: how many, and what they are."""
    rows = torch.zeros(len(shapes), _WORDS, dtype=torch.int64)
    for row, one in zip(rows, shapes, strict=True):
        row[0] = one.differentiated
        row[1:] = header_of(torch.empty(one.shape, dtype=one.dtype, device="meta")).encode()
    with operation("shapes", end, control=True):
        count = torch.tensor([len(shapes)], dtype=torch.int64)
        return [Sending(end, one, place, tag, headed=False) for one in (count, rows)]


def receive_shapes(end: Endpoint, place: int, tag: int) -> tuple[Shape, ...]:
    """What the neighbour at `place` is about to send."""
    with operation("shapes", end, control=True):
        count = torch.zeros(1, dtype=torch.int64)
        Receiving(end, count, place, tag, headed=False).wait()
        rows = torch.zeros(int(count), _WORDS, dtype=torch.int64)
        Receiving(end, rows, place, tag, headed=False).wait()
    headers = [(Header.decode(row[1:]), bool(row[0])) for row in rows]
    return tuple(Shape(header.shape, header.dtype, differentiated) for header, differentiated in headers)
