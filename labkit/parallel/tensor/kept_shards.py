"""Keeping a shard for backward instead of what was gathered from it.

A column-parallel layer needs its whole input once more in backward, for the gradient of its weight. It may keep the
gathered input, or only this rank's shard, and gather again: less memory, one more all-gather. Layers that take the same
input, as query, key and value do, gather it once.

Source: Korthikanti and others (2022), arXiv:2205.05198, section 4.2.2, at the end.
"""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from labkit.mesh import Axis
from labkit.parallel.tensor.conjugates import gather_in
from labkit.parallel.tensor.dims import gathered_along

_NAME = "_labkit_kept_shard"


class KeptShard:
    """What is kept of a gathered tensor, and how to have it again."""

    def __init__(self, shard: Tensor, dim: int, axis: Axis, gathered: Tensor) -> None:
        self.shard, self.dim, self.axis = shard.detach(), dim, axis
        self.storage = gathered.untyped_storage().data_ptr()
        self.packed = self.given = 0
        self.again: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != self.storage:
            return tensor
        self.packed += 1
        # the shard comes along, so that who counts memory sees it
        return self, self.shard, (tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.again is None:
            self.again = gathered_along(self.shard, self.dim, self.axis)
        result, self.given = self.again.as_strided(*packed[2]), self.given + 1
        if self.given == self.packed:  # the last layer that takes it; a second backward starts anew
            self.given, self.again = 0, None
        return result


def gather_and_keep_shard(shard: Tensor, dim: int, axis: Axis) -> Tensor:
    """As `gather_in`; layers that save the result within `keeping(result)` keep the shard."""
    gathered = gather_in(shard, dim, axis)
    if axis.size > 1:
        setattr(gathered, _NAME, KeptShard(shard, dim, axis, gathered))
    return gathered


def keeping(gathered: Tensor) -> AbstractContextManager[Any] | None:
    """In which a layer computes with a tensor of `gather_and_keep_shard`; None for any other."""
    kept: KeptShard | None = getattr(gathered, _NAME, None)
    return None if kept is None else saved_tensors_hooks(kept.pack, kept.unpack)
