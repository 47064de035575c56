"""Segments: what the optimizer steps of a flat shard, each a long tensor over many parameters.

One long tensor is stepped in a few operations, whatever the number of parameters. Where a parameter has no gradient on
any rank, the optimizer must leave it alone, decay of weights included: then its segment is split at the borders of the
parameters, once and for all, and the optimizer's state with it.
"""

import torch
from torch import nn
from torch.optim import Optimizer

from labkit.parallel.zero.buckets import ShardedBucket


class Segment:
    """Elements `start` to `stop` of this rank's part of a bucket: parameters `members`, which are in one group.

    `tensor` is what the optimizer steps: the values themselves, or a float32 copy of them where they have 16 bits.
    """

    def __init__(
        self, bucket: ShardedBucket, start: int, stop: int, members: list[int], tensor: nn.Parameter | None = None
    ) -> None:
        self.bucket, self.start, self.stop, self.members = bucket, start, stop, members
        values = bucket.part[start:stop]
        self.has_master = values.element_size() < 4
        self.tensor = tensor if tensor is not None else nn.Parameter(values.float() if self.has_master else values)

    def load_gradient(self) -> bool:
        """Give the optimizer the gradient, if all members have one; returns False where only some do."""
        reduced, used = self.bucket.reduced, [self.bucket.used[index] for index in self.members]
        if reduced is None or not any(used):
            self.tensor.grad = None
            return True
        if not all(used):
            return False
        self.tensor.grad = reduced[self.start : self.stop].to(self.tensor.dtype)  # itself where dtypes are equal
        return True

    def store(self) -> None:
        """Bring what was stepped into the bucket, and let go of the gradient."""
        if self.has_master and self.tensor.grad is not None:
            self.bucket.part[self.start : self.stop].copy_(self.tensor.detach())
        self.tensor.grad = None

    def load_values(self) -> None:
        """Take over the bucket's values, after something else has set them."""
        if self.has_master:
            self.tensor.detach().copy_(self.bucket.part[self.start : self.stop])

    def split(self, optimizer: Optimizer) -> list["Segment"]:
        """One segment for each member, in this one's place in the optimizer."""
        parts: list[Segment] = []
        for index in self.members:
            piece = self.bucket.layout.piece(index, self.bucket.place)
            first, last = piece.at - self.start, piece.at - self.start + piece.numel
            tensor = nn.Parameter(self.tensor.detach()[first:last])
            parts.append(Segment(self.bucket, piece.at, piece.at + piece.numel, [index], tensor))
            for key, value in optimizer.state.get(self.tensor, {}).items():
                if isinstance(value, torch.Tensor):
                    value = value[first:last] if value.shape == self.tensor.shape else value.clone()
                optimizer.state[tensor][key] = value
        optimizer.state.pop(self.tensor, None)
        for group in optimizer.param_groups:
            place = next((i for i, one in enumerate(group["params"]) if one is self.tensor), None)
            if place is not None:
                group["params"][place : place + 1] = [part.tensor for part in parts]
        return parts


def segments_of(bucket: ShardedBucket, groups: list[int]) -> list[tuple[int, Segment]]:
    """The segments of a bucket, with their groups: as long as neighbours are of one group. `groups[i]` is that of
    parameter i. What pads them is stepped along: it is zero, and stays so."""
    runs: list[tuple[int, list[int]]] = []
    for index in bucket.layout.order:
        if bucket.layout.piece(index, bucket.place).numel:
            if runs and runs[-1][0] == groups[index]:
                runs[-1][1].append(index)
            else:
                runs.append((groups[index], [index]))
    found = []
    for number, (group, members) in enumerate(runs):
        last = bucket.layout.piece(members[-1], bucket.place)
        start = bucket.layout.piece(members[0], bucket.place).at
        stop = bucket.layout.part_length if number == len(runs) - 1 else last.at + last.numel
        found.append((group, Segment(bucket, start, stop, members)))
    return found
