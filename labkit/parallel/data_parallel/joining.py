"""Uneven numbers of batches: ranks that are through shadow the others' collectives, with zeros, until the last is.

Before each collective of a forward or backward the ranks that still train announce it; those that are through answer,
and do the same. So all know how many are left and, when nobody is, that it is over. Source: the semantics are those
of PyTorch's `Join` (torch.distributed.algorithms.join), which divides by the whole world size too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from labkit.collectives import ReduceOp, all_reduce
from labkit.parallel.data_parallel.replicas import broadcast_tensors

if TYPE_CHECKING:
    from labkit.parallel.data_parallel.wrapper import DistributedDataParallel

BUFFERS, BACKWARD = "buffers", "backward"


class Join:
    """The agreement of the ranks of one wrapper while batches last."""

    def __init__(self, wrapper: "DistributedDataParallel") -> None:
        self.wrapper, self.end = wrapper, wrapper._end

    def announce(self, what: str | None) -> str | None:
        """Tell the others what this rank does next, None for nothing; returns what the training ones do."""
        told = torch.tensor([what is not None, what == BUFFERS, what == BACKWARD], device=self.wrapper._device)
        told = told.to(torch.int64)
        all_reduce(told, ReduceOp.SUM, self.end.group)
        training, *counts = told.tolist()
        if any(count not in (0, training) for count in counts):
            raise RuntimeError(
                f"join: of {training} ranks with batches left {counts[0]} begin a forward and {counts[1]} a backward: "
                "all of them must make the same calls"
            )
        if not training:
            return None
        return BUFFERS if counts[0] else BACKWARD

    @contextmanager
    def run(self) -> Iterator[None]:
        wrapper = self.wrapper
        if wrapper._join is not None:
            raise RuntimeError("join: this wrapper is in a join() already; leave it first")
        wrapper._join = self
        missed = 0
        try:
            yield
            while (what := self.announce(None)) is not None:
                missed += 1
                if what == BUFFERS:
                    wrapper.broadcast_buffers()
                else:
                    wrapper._reducer.shadow()
        finally:
            wrapper._join = None
        self.take_final_parameters(missed)

    def take_final_parameters(self, missed: int) -> None:
        """All take the parameters and buffers of the first rank that trained to the end."""
        everyones = torch.full((self.end.size,), -1, dtype=torch.int64, device=self.wrapper._device)
        everyones[self.end.place] = missed
        all_reduce(everyones, ReduceOp.MAX, self.end.group)
        source = int((everyones == everyones.min()).nonzero()[0])
        module = self.wrapper.module
        broadcast_tensors([*module.parameters(), *module.buffers()], self.end, source=source)
