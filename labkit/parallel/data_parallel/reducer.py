"""The reducer: hears from autograd that a gradient is ready, and reduces a bucket when its last one is.

Source: S. Li and others, PyTorch Distributed (VLDB 2020), section 3.2: buckets are reduced in one order on all ranks,
whatever the order in which they fill.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labkit.collectives import ReduceOp, Work, all_reduce, broadcast
from labkit.collectives.agreement import agree
from labkit.collectives.groups import Endpoint
from labkit.parallel.data_parallel.buckets import FIRST_BUCKET_BYTES, Bucket, assign


class Reducer:
    """Averages the gradients of `named` parameters over a group, during backward.

    `overlap=False` reduces each bucket in the foreground when it is full. The order of readiness is taken to be the
    reverse of `named`'s until the first backward has shown it. `before_first` is called before a backward sends
    anything. Parameters go by their number in `named`.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        end: Endpoint,
        *,
        cap_bytes: float,
        overlap: bool,
        find_unused: bool,
        algorithm: str,
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        self.end, self.overlap, self.find_unused, self.algorithm = end, overlap, find_unused, algorithm
        self.cap_bytes, self.before_first = cap_bytes, before_first
        self.names, self.parameters = list(named), list(named.values())
        self.armed = False  # the next backward averages
        self.local_task = -1  # a backward that does not, though another is awaited
        self.rebuilt = False
        self.arrange(list(reversed(range(len(named)))))
        me = weakref.ref(self)
        # held by the parameters, so they must not hold the reducer
        self.handles = [
            parameter.register_post_accumulate_grad_hook(_hook(me, number))
            for number, parameter in enumerate(self.parameters)
        ]

    def arrange(self, order: list[int]) -> None:
        """Make the buckets for parameters in the order of readiness."""
        first = min(FIRST_BUCKET_BYTES, self.cap_bytes)
        ordered = [self.parameters[number] for number in order]
        places = assign(ordered, cap_bytes=self.cap_bytes, first_cap_bytes=first)
        self.members = [[order[place] for place in bucket] for bucket in places]
        self.buckets = [Bucket([self.parameters[number] for number in bucket]) for bucket in self.members]
        homes = {
            number: (bucket, index)
            for bucket, members in zip(self.buckets, self.members, strict=True)
            for index, number in enumerate(members)
        }
        self.homes = [homes[number] for number in range(len(homes))]
        self.reset()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def reset(self) -> None:
        """Forget the backward that has ended."""
        self.running, self.next_bucket = False, 0
        self.kept: list[Any] = []
        self.works: list[Work | None] = []
        self.order: list[int] = []  # ready in this backward
        self.is_ready = [False] * len(self.parameters)
        for bucket in self.buckets:
            bucket.forget()

    # --- forward ---

    def expect(self) -> None:
        """A forward whose backward averages."""
        if self.running and torch._C._current_graph_task_id() < 0:
            # an error ended the last backward: did it on all ranks, they can go on
            self.wait_for_works()
            agree(self.end, "a forward after a backward that ended in an error")
            self.reset()
        self.armed = True

    # --- backward ---

    def begin(self, *, averages: bool, keep: list[Any] | None = None) -> None:
        """Backward has reached an output of the model: ask autograd to call `finish` at the end. What is in `keep` is
        held until then, and taken out of it."""
        if keep:
            self.kept.append(keep.pop())
        if not averages:
            self.local_task = torch._C._current_graph_task_id()
        elif not self.running:
            self.running = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def ready(self, number: int) -> None:
        """A gradient is complete: called by autograd's hook."""
        if not self.running:
            if not self.armed or torch._C._current_graph_task_id() == self.local_task:
                return
            self.begin(averages=True)
        if not self.order:
            self.before_first()
        elif self.is_ready[number]:
            self.refuse_twice(number)
        self.order.append(number)
        self.is_ready[number] = True
        bucket, index = self.homes[number]
        try:
            bucket.take(index, self.end.size)
            if bucket.waiting == 0:
                self.reduce_full_ones()
        except Exception:
            self.explain()
            raise

    def reduce_full_ones(self) -> None:
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].waiting == 0:
            bucket = self.buckets[self.next_bucket]
            bucket.close(self.end.size)
            self.next_bucket += 1
            # backward has nothing left to do meanwhile when the last is full
            hides = self.overlap and self.next_bucket < len(self.buckets)
            self.works.append(self.reduce(bucket.flat, async_op=hides))

    def reduce(self, tensor: torch.Tensor, op: Any = ReduceOp.SUM, *, async_op: bool = False) -> Work | None:
        return all_reduce(tensor, op, self.end.group, async_op, algorithm=self.algorithm)

    def wait_for_works(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()

    def finish(self) -> None:
        """The end of backward: see to what was not ready, wait for the reductions."""
        if not self.order:
            self.running = False  # autograd.grad: it passed through the model, but asked for no parameter's gradient
            return
        missing = [number for number, ready in enumerate(self.is_ready) if not ready]
        if missing and not self.find_unused:
            self.refuse_unused(missing)
        for number in missing:
            bucket, index = self.homes[number]
            # what was accumulated before, else zeros
            bucket.take(index, self.end.size)
        self.reduce_full_ones()
        self.wait_for_works()
        if self.find_unused:
            self.settle(missing)
        elif not self.rebuilt:
            self.rebuild(self.order)
        self.armed = False
        self.reset()

    def settle(self, missing: list[int]) -> None:
        """Give this rank the gradients that only others have computed; what nobody has stays None.

        Which exist somewhere is one byte a parameter, after the buckets, on every rank.
        """
        flags = self.flags([parameter.grad is not None for parameter in self.parameters])
        self.reduce(flags, ReduceOp.MAX)
        somewhere = flags.tolist()
        for number in missing:
            if somewhere[number]:
                bucket, index = self.homes[number]
                self.parameters[number].grad = bucket.views[index]

    def flags(self, values: list[bool]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.uint8, device=self.parameters[0].device)

    def rebuild(self, observed: list[int]) -> None:
        """Arrange the buckets once more, in the order that the group's first rank has observed: one broadcast of eight
        bytes a parameter."""
        self.rebuilt = True
        order = torch.tensor(observed, device=self.parameters[0].device)
        broadcast(order, group=self.end.group, group_src=0)
        if order.tolist() == self.arranged:
            return
        self.arrange(order.tolist())
        for parameter, (bucket, index) in zip(self.parameters, self.homes, strict=True):
            if parameter.grad is not None:
                parameter.grad = bucket.views[index].copy_(parameter.grad)

    @property
    def arranged(self) -> list[int]:
        """The parameters in the order of the buckets."""
        return [number for members in self.members for number in members]

    def shadow(self) -> None:
        """What a backward sends, with nothing to add to it."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            self.reduce(bucket.flat)
        if self.find_unused:
            self.reduce(self.flags([False] * len(self.parameters)), ReduceOp.MAX)
        elif not self.rebuilt:
            self.rebuild(self.arranged)

    # --- what a user gets wrong ---

    @property
    def here(self) -> str:
        return f"rank {self.end.members[self.end.place]}"

    def refuse_unused(self, missing: list[int]) -> None:
        names = ", ".join(sorted(self.names[number] for number in missing)[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        self.wait_for_works()  # what all have begun
        self.armed = False
        self.reset()
        raise RuntimeError(
            f"DistributedDataParallel: {self.here} computed no gradient for {names}{more}: use them in every forward "
            "and in the loss, freeze them (requires_grad=False) before wrapping, or pass find_unused_parameters=True"
        )

    def refuse_twice(self, number: int) -> None:
        raise RuntimeError(
            f"DistributedDataParallel: the gradient of {self.names[number]} was ready twice in one backward on "
            f"{self.here}, as it is where a parameter is used in several reentrant checkpoints: checkpoint with "
            "use_reentrant=False"
        )

    def explain(self) -> None:
        """Raise a sentence where a gradient is of a kind that has no place in its bucket."""
        for name, parameter, (bucket, _) in zip(self.names, self.parameters, self.homes, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"DistributedDataParallel: the gradient of {name} is sparse and can't be averaged: build the layer "
                    "with sparse=False"
                ) from None
            if parameter.dtype != bucket.flat.dtype:
                raise RuntimeError(
                    f"DistributedDataParallel: {name} was converted to {parameter.dtype} after wrapping: convert the "
                    "module first, then wrap it"
                ) from None


def _hook(me: "weakref.ref[Reducer]", number: int) -> Callable[[Any], None]:
    def ready(_: Any) -> None:
        reducer = me()
        if reducer is not None:
            reducer.ready(number)

    return ready
