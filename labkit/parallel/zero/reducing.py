"""Reducing gradients to shards while backward computes: stages 1 and 2.

Autograd says when a gradient is ready. Buckets are reduced in one order on all ranks, whatever the order in which they
fill (S. Li and others, PyTorch Distributed, VLDB 2020, section 3.2). A backward is through when its last bucket is; one
that left a parameter out when somebody asks for the result.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from labkit.collectives import ReduceOp, Work, all_reduce
from labkit.collectives.groups import Endpoint
from labkit.parallel.zero.buckets import ShardedBucket
from labkit.parallel.zero.scattering import reduce_scatter


class ShardReducer:
    """Reduces the gradients of `buckets`, which are in the order in which they are expected to fill."""

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        end: Endpoint,
        *,
        overlap: bool,
        find_unused: bool,
        algorithm: str,
        describe: Callable[[nn.Parameter], str],
    ) -> None:
        self.buckets, self.end = list(buckets), end
        self.overlap, self.find_unused, self.algorithm = overlap, find_unused, algorithm
        self.describe = describe
        self.sync = True
        self.reset()
        me = weakref.ref(self)
        # held by the parameters, so they must not hold the reducer
        self.handles = [
            parameter.register_post_accumulate_grad_hook(_hook(me, bucket, index))
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def reset(self) -> None:
        """Forget the backward that has ended."""
        self.next_bucket = 0
        self.ready_ones: set[tuple[int, int]] = set()
        self.under_way: list[tuple[ShardedBucket, torch.Tensor, Work | None]] = []
        for bucket in self.buckets:
            bucket.forget()

    # --- backward ---

    def ready(self, bucket: ShardedBucket, index: int) -> None:
        """A gradient is complete: called by autograd's hook."""
        self.check(bucket.parameters[index], bucket)
        if not self.sync:
            bucket.keep(index)
            return
        key = id(bucket), index
        if key in self.ready_ones:  # this is another backward
            self.finish()
        self.ready_ones.add(key)
        bucket.take(index, self.end.size)
        if bucket.waiting == 0:
            self.reduce_full_ones()
            if self.next_bucket == len(self.buckets):
                self.finish()

    def reduce_full_ones(self) -> None:
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].waiting == 0:
            bucket = self.buckets[self.next_bucket]
            self.next_bucket += 1
            bucket.close(self.end.size)
            assert bucket.flat is not None
            output = bucket.output()
            # backward has nothing left to do meanwhile when the last is full
            hides = self.overlap and self.next_bucket < len(self.buckets)
            self.settle(bucket.in_flight - hides)
            work = reduce_scatter(output, bucket.flat, self.end, algorithm=self.algorithm, async_op=hides)
            self.under_way.append((bucket, output, work))
            if not hides:
                self.settle(0)

    def settle(self, allowed: int) -> None:
        """Wait until at most `allowed` reductions are under way."""
        while len(self.under_way) > allowed:
            bucket, output, work = self.under_way.pop(0)
            if work is not None:
                work.wait()
            bucket.settle(output)

    @property
    def is_open(self) -> bool:
        """Whether a backward has begun to reduce and was not finished."""
        return bool(self.ready_ones)

    def finish(self) -> None:
        """See to what was not ready, and wait for the reductions."""
        if not self.is_open:
            return
        missing = [
            (bucket, index)
            for bucket in self.buckets
            for index in range(len(bucket.parameters))
            if (id(bucket), index) not in self.ready_ones
        ]
        if missing and not self.find_unused:
            self.refuse_unused([bucket.parameters[index] for bucket, index in missing])
        for bucket, index in missing:
            bucket.take(index, self.end.size)  # what was accumulated before, else zeros
        self.reduce_full_ones()
        self.settle(0)
        if self.find_unused:
            self.agree_on_use()
        self.reset()

    def agree_on_use(self) -> None:
        """Which parameters have a gradient on some rank: one byte each, after the buckets."""
        used = [flag for bucket in self.buckets for flag in bucket.used]
        flags = torch.tensor(used, dtype=torch.uint8, device=self.buckets[0].values.device)
        all_reduce(flags, ReduceOp.MAX, self.end.group)
        for bucket, part in zip(self.buckets, flags.split([len(one.parameters) for one in self.buckets]), strict=True):
            bucket.used = [bool(flag) for flag in part.tolist()]

    def abandon(self) -> None:
        """Forget a backward that has begun, once what was sent of it is through."""
        self.settle(0)
        self.reset()

    # --- what a user gets wrong ---

    @property
    def here(self) -> str:
        return f"rank {self.end.members[self.end.place]}"

    def refuse_unused(self, missing: list[nn.Parameter]) -> None:
        names = ", ".join(sorted(self.describe(parameter) for parameter in missing)[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        self.abandon()
        raise RuntimeError(
            f"ZeroRedundancyOptimizer: {self.here} computed no gradient for {names}{more}: use them in every forward "
            "and in the loss, freeze them (requires_grad=False) before, or pass find_unused_parameters=True"
        )

    def check(self, parameter: nn.Parameter, bucket: ShardedBucket) -> None:
        """Raise a sentence where the gradient is of a kind that has no place in its bucket."""
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise RuntimeError(
                f"ZeroRedundancyOptimizer: the gradient of {self.describe(parameter)} is sparse and can't be sharded: "
                "build the layer with sparse=False"
            )
        if parameter.dtype != bucket.values.dtype:
            raise RuntimeError(
                f"ZeroRedundancyOptimizer: {self.describe(parameter)} was converted to {parameter.dtype} after the "
                "optimizer was built: convert the module first, then build the optimizer"
            )


def _hook(me: "weakref.ref[ShardReducer]", bucket: ShardedBucket, index: int) -> Callable[[Any], None]:
    def ready(_: Any) -> None:
        reducer = me()
        if reducer is not None:
            reducer.ready(bucket, index)

    return ready
