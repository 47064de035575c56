"""`Placement`: which part of a parameter a rank holds, and what the other ranks hold of it.

The scaler, clipping, verification, snapshots and resharding read nothing else, so that no technique invents its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from labkit.mesh.axes import Axis, AxisLike, as_axis
from labkit.mesh.boxes import Box, Range, cut, sizes, views


@dataclass(frozen=True)
class Placement:
    """The piece of one global tensor that this rank holds.

    Build it step by step from the whole: `Placement.of(weight).sharded(0, mesh["tp"]).replicated(mesh["dp"])`.

    Args:
        shape: the global shape.
        dtype: the dtype of what is held.
        slices: (start, stop) for each dim of the global tensor; the whole if not given.
        flat: (start, stop) in the flattened block that `slices` cut out, or None for all of it. A piece with `flat` has
            one dim.
        sharded_over: axes along which the other ranks hold other pieces of this tensor or, along the axis of pipeline
            stages, none of it.
        replicated_over: axes along which every rank holds this piece too. An axis in none of the three counts as one.
        tied_over: lines of ranks that hold this piece as well, because several layers on different stages share it.

    Raises ValueError in one sentence where these contradict each other.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[Range, ...] = None  # type: ignore[assignment]  # filled in below
    flat: Range | None = None
    sharded_over: tuple[Axis, ...] = ()
    replicated_over: tuple[Axis, ...] = ()
    tied_over: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # frozen
        set_field(self, "shape", tuple(self.shape))
        whole = tuple((0, size) for size in self.shape)
        slices = whole if self.slices is None else tuple((start, stop) for start, stop in self.slices)
        set_field(self, "slices", slices)
        if len(slices) != len(self.shape):
            raise ValueError(f"Placement: {len(slices)} slices for the {len(self.shape)} dims of {list(self.shape)}")
        for dim, ((start, stop), size) in enumerate(zip(slices, self.shape, strict=True)):
            if not 0 <= start <= stop <= size:
                raise ValueError(f"Placement: dim {dim} is cut from {start} to {stop}, but its size is {size}")
        if self.flat is not None:
            start, stop = self.flat
            count = math.prod(sizes(slices))
            if not 0 <= start <= stop <= count:
                raise ValueError(f"Placement: the flat range is {start} to {stop}, but the block has {count} elements")
            set_field(self, "flat", (start, stop))
        named = [axis.name for axis in (*self.sharded_over, *self.replicated_over, *self.tied_over)]
        for name in named:
            if named.count(name) > 1:
                raise ValueError(f"Placement: axis {name!r} is named twice; it is sharded, replicated or tied")

    # --- building ---

    @staticmethod
    def of(tensor: torch.Tensor) -> "Placement":
        """The whole of `tensor`, which has the global shape."""
        return Placement(tuple(tensor.shape), tensor.dtype)

    def sharded(self, dim: int, axis: AxisLike, *, start: int | None = None, stop: int | None = None) -> "Placement":
        """Cut along `dim`. Without `start` and `stop`, places in the global tensor, the axis shares out what is held so
        far in parts that differ by at most one, the longer ones first (as torch.tensor_split)."""
        line = as_axis(axis)
        if self.flat is not None:
            raise ValueError("Placement: a flat range has no dims any more; shard along dims first, then flatten")
        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(f"Placement: there is no dim {dim} in a tensor of shape {list(self.shape)}")
        dim %= len(self.shape)
        if (start is None) != (stop is None):
            raise ValueError("Placement: give both start and stop, or neither")
        if start is None or stop is None:
            begin, end = self.slices[dim]
            each, more = divmod(end - begin, line.size)
            place = line.coordinate
            start = begin + place * each + min(place, more)
            stop = start + each + (place < more)
        slices = (*self.slices[:dim], (start, stop), *self.slices[dim + 1 :])
        return replace(self, slices=slices, sharded_over=(*self.sharded_over, line))

    def sharded_flat(self, start: int, stop: int, axis: AxisLike) -> "Placement":
        """Keep elements `start` to `stop` of what is held so far, flattened: a ZeRO shard. It may be empty."""
        if self.flat is not None:
            start, stop = start + self.flat[0], stop + self.flat[0]
            if stop > self.flat[1]:
                raise ValueError(f"Placement: the flat range holds {self.numel} elements, not {stop - self.flat[0]}")
        return replace(self, flat=(start, stop), sharded_over=(*self.sharded_over, as_axis(axis)))

    def staged(self, axis: AxisLike) -> "Placement":
        """On this rank's stage of the pipeline only."""
        return replace(self, sharded_over=(*self.sharded_over, as_axis(axis)))

    def replicated(self, axis: AxisLike) -> "Placement":
        """The same piece on every rank along the axis."""
        return replace(self, replicated_over=(*self.replicated_over, as_axis(axis)))

    def tied(self, axis: AxisLike) -> "Placement":
        """The same piece on these ranks, which hold it for different layers, and sum its gradients between them. A
        tie is a line of its holders, first to last, not the whole axis of stages, unless all stages hold it."""
        return replace(self, tied_over=(*self.tied_over, as_axis(axis)))

    # --- reading ---

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of what `slices` cut out."""
        return sizes(self.slices)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the piece: [stop - start] for a flat range."""
        return self.block if self.flat is None else (self.flat[1] - self.flat[0],)

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return math.prod(self.local_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.numel * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the global tensor in its own shape."""
        return self.local_shape == self.shape and self.flat is None

    @property
    def boxes(self) -> list[Box]:
        """The piece as rectangular blocks of the global tensor, in the order of its memory."""
        return cut(self.slices, *(self.flat or (0, math.prod(self.block))))

    # --- between the piece and the whole ---

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the global tensor, [local_shape], a contiguous copy."""
        self._must_be(full, self.shape, "the global tensor")
        local = torch.empty(self.local_shape, dtype=full.dtype, device=full.device)
        for box, view in zip(self.boxes, views(local.view(-1), self.boxes), strict=True):
            view.copy_(full.detach()[_index(box)])
        return local

    def put(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """Write this rank's piece [local_shape] to its place in the global tensor, in place."""
        self._must_be(full, self.shape, "the global tensor")
        self._must_be(local, self.local_shape, "the piece")
        for box, view in zip(self.boxes, views(local.detach().reshape(-1), self.boxes), strict=True):
            full.detach()[_index(box)].copy_(view)

    def _must_be(self, tensor: torch.Tensor, shape: Sequence[int], what: str) -> None:
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"Placement: {what} has shape {list(tensor.shape)}, not {list(shape)}")


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
