"""Uneven numbers of batches: ranks that are through shadow the others' collectives, with zeros, until the last is.

Before each forward the ranks that still train announce it; those that are through answer. So all know how many are
left and, when nobody is, that it is over. Source: the semantics are those of PyTorch's `Join` (torch.distributed
.algorithms.join), which divides by the whole world size too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from labkit.collectives import ReduceOp, all_reduce
from labkit.parallel.data_parallel.replicas import broadcast_tensors

if TYPE_CHECKING:
    from labkit.parallel.data_parallel.wrapper import DistributedDataParallel


class Join:
    """The agreement of the ranks of one wrapper while batches last."""

    def __init__(self, wrapper: "DistributedDataParallel") -> None:
        self.wrapper, self.end = wrapper, wrapper._end

    def count(self, *, active: bool, sync: bool) -> tuple[int, bool]:
        """How many ranks still train, and whether the coming backward reduces."""
        told = torch.tensor([int(active), int(sync)], dtype=torch.int64)
        all_reduce(told, ReduceOp.SUM, self.end.group)
        return int(told[0]), bool(told[1])

    def announce(self, *, sync: bool) -> None:
        """Before a forward of a rank that still trains."""
        self.count(active=True, sync=sync)

    @contextmanager
    def run(self) -> Iterator[None]:
        wrapper = self.wrapper
        if wrapper._join is not None:
            raise RuntimeError("join: this wrapper is in a join() already; leave it first")
        wrapper._join = self
        steps_of_others = 0
        try:
            yield
            while True:
                active, sync = self.count(active=False, sync=False)
                if not active:
                    break
                steps_of_others += 1
                if sync:
                    self.shadow()
        finally:
            wrapper._join = None
        self.take_final_parameters(steps_of_others)

    def shadow(self) -> None:
        """What the others' forward and backward send, with nothing to add."""
        reducer = self.wrapper._reducer
        reducer.prepare(enabled=True)
        if self.wrapper._broadcast_buffers:
            self.wrapper.broadcast_buffers()
        for bucket in reducer.buckets:
            bucket.flat.zero_()
            all_reduce(bucket.flat, ReduceOp.SUM, self.end.group, algorithm=reducer.algorithm)
        reducer.shadow_end()

    def take_final_parameters(self, steps_of_others: int) -> None:
        """All take the parameters and buffers of the first rank that trained to the end."""
        missed = torch.full((self.end.size,), -1, dtype=torch.int64)
        missed[self.end.place] = steps_of_others
        all_reduce(missed, ReduceOp.MAX, self.end.group)
        source = int((missed == missed.min()).nonzero()[0])
        module = self.wrapper.module
        broadcast_tensors([*module.parameters(), *module.buffers()], self.end, source=source)
