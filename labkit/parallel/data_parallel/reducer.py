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
from labkit.collectives.groups import Endpoint
from labkit.parallel.data_parallel.buckets import FIRST_BUCKET_BYTES, Bucket, assign


class Reducer:
    """Averages the gradients of `named` parameters over a group, during backward.

    `overlap=False` reduces each bucket in the foreground when it is full. `ordered` parameters are reversed, as
    backward reaches them, until the first backward has shown its true order.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        end: Endpoint,
        *,
        cap_bytes: int,
        overlap: bool,
        find_unused: bool,
        algorithm: str,
    ) -> None:
        self.end, self.overlap, self.find_unused, self.algorithm = end, overlap, find_unused, algorithm
        self.cap_bytes = cap_bytes
        self.names = {parameter: name for name, parameter in named.items()}
        self.enabled = True  # whether the backward to come reduces
        self.rebuilt = False
        self.observed: list[nn.Parameter] = []
        self.seen: dict[nn.Parameter, None] = {}  # ready in this backward, in order
        self.works: list[Work | None] = []
        self.running = False
        self.arrange(list(reversed(named.values())))
        me = weakref.ref(self)
        # held by the parameters, so they must not hold the reducer
        self.handles = [p.register_post_accumulate_grad_hook(_hook(me)) for p in named.values()]

    def arrange(self, ordered: list[nn.Parameter]) -> None:
        """Make the buckets for parameters in the order of readiness."""
        first = min(FIRST_BUCKET_BYTES, self.cap_bytes)
        places = assign(ordered, cap_bytes=self.cap_bytes, first_cap_bytes=first)
        self.buckets = [Bucket([ordered[place] for place in bucket]) for bucket in places]
        self.home = {
            parameter: (number, index)
            for number, bucket in enumerate(self.buckets)
            for index, parameter in enumerate(bucket.parameters)
        }

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    # --- forward ---

    def prepare(self, *, enabled: bool) -> None:
        """Before a forward: take over the observed order once, and forget what an interrupted backward left."""
        if not self.rebuilt and self.observed and not self.find_unused:
            self.take_over_order()
        self.enabled = enabled
        self.reset()

    def reset(self) -> None:
        self.running, self.next_bucket, self.works = False, 0, []
        self.seen = {}
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)

    def take_over_order(self) -> None:
        """Rebuild the buckets once, in the order that the group's first rank observed."""
        self.rebuilt = True
        initial = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        places = {parameter: place for place, parameter in enumerate(initial)}
        order = torch.tensor([places[parameter] for parameter in self.observed], dtype=torch.int64)
        broadcast(order, group=self.end.group, group_src=0)
        if order.tolist() != list(range(len(initial))):
            self.arrange([initial[place] for place in order.tolist()])

    # --- backward ---

    def begin(self) -> None:
        """Backward has reached the model: ask autograd to call `finish` at its end."""
        if self.enabled and not self.running:
            self.running = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def ready(self, parameter: nn.Parameter) -> None:
        """A gradient is complete: called by autograd's hook."""
        if not self.enabled:
            return
        self.begin()
        self.seen[parameter] = None
        number, index = self.home[parameter]
        bucket = self.buckets[number]
        bucket.take(index, self.end.size)
        parameter.grad = bucket.views[index]
        bucket.waiting -= 1
        self.reduce_full_ones()

    def reduce_full_ones(self) -> None:
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].waiting == 0:
            bucket = self.buckets[self.next_bucket]
            self.works.append(
                all_reduce(bucket.flat, ReduceOp.SUM, self.end.group, self.overlap, algorithm=self.algorithm)
            )
            self.next_bucket += 1

    def finish(self) -> None:
        """The end of backward: see to what was not ready, wait for the reductions."""
        unused = [parameter for parameter in self.names if parameter not in self.seen]
        if unused and not self.find_unused:
            self.refuse_unused(unused)
        kept = {p: None if p.grad is None else p.grad.detach().clone() for p in unused}
        for parameter in unused:
            number, index = self.home[parameter]
            # what was accumulated before, else zeros
            self.buckets[number].take(index, self.end.size)
            self.buckets[number].waiting -= 1
        self.reduce_full_ones()
        for work in self.works:
            if work is not None:
                work.wait()
        if self.find_unused:
            self.settle(unused, kept)
        if not self.rebuilt:
            self.observed = list(self.seen)
        self.reset()

    def shadow_end(self) -> None:
        """What `finish` sends besides the buckets, for a rank that has no batch left."""
        if self.find_unused:
            all_reduce(
                torch.zeros(len(self.names), dtype=torch.uint8), ReduceOp.MAX, self.end.group, algorithm=self.algorithm
            )
        if not self.rebuilt and not self.observed:
            # the others have observed an order; the first rank's own, if it has none, is that of the buckets
            self.observed = [parameter for bucket in self.buckets for parameter in bucket.parameters]

    def refuse_unused(self, unused: list[nn.Parameter]) -> None:
        names = ", ".join(sorted(self.names[parameter] for parameter in unused)[:5])
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        self.reset()
        raise RuntimeError(
            f"DistributedDataParallel: rank {self.end.members[self.end.place]} computed no gradient for {names}{more}: "
            "use them in every forward, freeze them (requires_grad=False) before wrapping, or pass "
            "find_unused_parameters=True"
        )

    def settle(self, unused: list[nn.Parameter], kept: dict[nn.Parameter, torch.Tensor | None]) -> None:
        """Give this rank the gradients that other ranks computed. One that nobody computed stays as it was, None
        included. Which are used somewhere is one byte a parameter, and comes after the buckets, as on every rank."""
        used = torch.tensor([parameter in self.seen for parameter in self.names], dtype=torch.uint8)
        all_reduce(used, ReduceOp.MAX, self.end.group, algorithm=self.algorithm)
        somewhere = dict(zip(self.names, used.tolist(), strict=True))
        for parameter in unused:
            number, index = self.home[parameter]
            parameter.grad = self.buckets[number].views[index] if somewhere[parameter] else kept[parameter]


def _hook(me: "weakref.ref[Reducer]") -> Callable[[Any], None]:
    def ready(parameter: Any) -> None:
        reducer = me()
        if reducer is not None:
            reducer.ready(parameter)

    return ready
