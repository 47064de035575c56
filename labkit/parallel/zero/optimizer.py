"""`ZeroRedundancyOptimizer`: each rank steps its part of the parameters, and keeps the optimizer's state of that only.

Source: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models (SC20), arXiv:1910.02054, sections 5.1 and 5.2: stages 1 and 2.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from labkit.collectives import all_gather_into_tensor
from labkit.collectives.groups import endpoint
from labkit.mesh import FlatPart, Gradient, Placement, as_axis, place, placement_of
from labkit.mesh.axes import AxisLike
from labkit.parallel.data_parallel.buckets import FIRST_BUCKET_BYTES, assign
from labkit.parallel.data_parallel.marking import claim, disclaim
from labkit.parallel.data_parallel.replicas import broadcast_tensors
from labkit.parallel.zero.buckets import ShardedBucket
from labkit.parallel.zero.offload import offload_optimizer_state
from labkit.parallel.zero.reducing import ShardReducer
from labkit.parallel.zero.refusing import (
    refuse_bad_optimizer,
    refuse_bad_parameters,
    refuse_whole_tensor_optimizer,
)
from labkit.parallel.zero.segments import Segment, segments_of
from labkit.parallel.zero.stage_one import WholeGradients
from labkit.parallel.zero.stage_two import FreedGradients


class ZeroRedundancyOptimizer(Optimizer):
    """A torch optimizer whose state is sharded over ranks; with stage 2 the gradients are, too. Reduces by itself.

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, stage=2, lr=1e-3)

    The model itself stays whole on every rank and is called as it is. A backward averages its gradients over the ranks,
    each rank receiving the part that it steps; `step()` steps it and gathers the parameters. Of P elements over N ranks
    a rank sends 2 P (N - 1) / N a step, as data parallel does. Each bucket is padded by less than N elements, and
    where several parameters have sizes that are no multiples of 64 bytes, by less than that before each but the first.

    Args:
        params: as for a torch optimizer: parameters, or groups of them. Set to those of the group's first rank. They
            must not be wrapped. Those that need no gradient when this is built are left alone.
        optimizer_class: one that steps each element by itself, such as SGD or AdamW, built with `defaults`.
        stage: 1 or 2.
        process_group: the ranks to share among: a group, an axis of a mesh, None for the world.
        bucket_cap_mb: megabytes (of 2^20 bytes) of gradients that are reduced together. The first bucket has 1.
        overlap: reduce in the background while backward computes.
        find_unused_parameters: let a rank leave out parameters that others use. Costs one byte a parameter and step.
        algorithm: "ring", or "naive", which sums in rank order.
        offload: a folder for this rank's optimizer state, which then lies in memory-mapped files there.

    `.optim` is the optimizer that steps this rank's part; `.state` is its state. After a backward each parameter's
    `.grad` is None, so that only this optimizer's zero_grad forgets gradients, not the module's: this rank's piece of
    the mean is where its Placement says, for `labkit.mesh.clip_grad_norm_`.
    Parameters of 16 bits are stepped in float32 copies of this rank's part. Buffers are not synchronised here.

    A wrong argument is a ValueError or TypeError, what goes wrong in training a RuntimeError.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        *,
        stage: int = 1,
        process_group: AxisLike = None,
        bucket_cap_mb: float = 25,
        overlap: bool = True,
        find_unused_parameters: bool = False,
        algorithm: str = "ring",
        offload: str | Path | None = None,
        **defaults: Any,
    ) -> None:
        refuse_bad_optimizer(stage, bucket_cap_mb, algorithm, optimizer_class)
        self.stage, self._axis, self._is_built = stage, as_axis(process_group), False
        self._end = endpoint(self._axis.group)
        super().__init__(params, dict(defaults))
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        self._describe = _describer(everything)
        refuse_bad_parameters(everything)
        self._trained = [parameter for parameter in everything if parameter.requires_grad]
        self._frozen = [parameter for parameter in everything if not parameter.requires_grad]
        broadcast_tensors(everything, self._end)
        kind = WholeGradients if stage == 1 else FreedGradients
        cap, order = bucket_cap_mb * (1 << 20), self._trained[::-1]
        places = assign(order, cap_bytes=cap, first_cap_bytes=min(FIRST_BUCKET_BYTES, cap))
        self.buckets: list[ShardedBucket] = [kind([order[i] for i in bucket], self._end) for bucket in places]
        self._segments = self._cut()
        self.optim = self._build(optimizer_class, defaults)
        self.defaults, self.state = self.optim.defaults, self.optim.state
        for mine, group in zip(self.param_groups, self.optim.param_groups, strict=True):
            mine.update({key: value for key, value in group.items() if key != "params"})
        self._reducer = ShardReducer(
            self.buckets,
            self._end,
            overlap=overlap,
            find_unused=find_unused_parameters,
            algorithm=algorithm,
            describe=self._describe,  # holds no reference to the optimizer
        )
        self._is_built = True
        placed = self._place()
        weakref.finalize(self, _let_go, self._reducer, placed).atexit = False
        if offload is not None:
            offload_optimizer_state(self.optim, offload)

    def _cut(self) -> list[tuple[int, Segment]]:
        groups = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
        return [
            one
            for bucket in self.buckets
            for one in segments_of(bucket, [groups[parameter] for parameter in bucket.parameters])
        ]

    def _build(self, optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]) -> Optimizer:
        groups = [
            {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "params": [segment.tensor for number, segment in self._segments if number == index],
            }
            for index, group in enumerate(self.param_groups)
        ]
        built = optimizer_class(groups, **defaults)
        refuse_whole_tensor_optimizer(built)
        return built

    def _place(self) -> list[tuple[torch.Tensor, Placement]]:
        """Say of each parameter that it is whole here, and which piece of its gradient is."""
        before: list[tuple[torch.Tensor, Placement]] = []
        me = weakref.ref(self)
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                held = placement_of(parameter)
                before.append((parameter, held))
                piece = bucket.layout.piece(index, bucket.place)
                gradient = Gradient(_reader(me, bucket, index), held.sharded_flat(piece.start, piece.stop, self._axis))
                place(parameter, held.replicated(self._axis), gradient=gradient)
                claim(parameter)
        return before

    @property
    def process_group(self) -> Any:
        """The group that gradients are averaged over."""
        return self._axis.group

    # --- a step ---

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate gradients, whole on each rank; the next one outside averages their sum."""
        before, self._reducer.sync = self._reducer.sync, False
        try:
            yield
        finally:
            self._reducer.sync = before

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's part, and gather all parameters. Every rank calls it together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reducer.finish()
        self._check()
        self._hand_over_settings()
        if not all(segment.load_gradient() for _, segment in self._segments):
            self._split()
        self.optim.step()
        for _, segment in self._segments:
            segment.store()
        for bucket in self.buckets:
            if bucket.reduced is not None:
                self._gather(bucket)
        return loss

    def _gather(self, bucket: ShardedBucket) -> None:
        all_gather_into_tensor(bucket.values, bucket.part, self._end.group)
        for parameter in bucket.parameters:  # so that a graph which still needs the old values says so
            torch.autograd.graph.increment_version(parameter)

    def _split(self) -> None:
        """Separate the parameters of segments of which only some have a gradient."""
        segments: list[tuple[int, Segment]] = []
        for group, segment in self._segments:
            segments += [(group, one) for one in ([segment] if segment.load_gradient() else segment.split(self.optim))]
        self._segments = segments
        for _, segment in segments:
            segment.load_gradient()

    def _hand_over_settings(self) -> None:
        for mine, group in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update({key: value for key, value in mine.items() if key not in ("params", "param_names")})

    def _check(self) -> None:
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"ZeroRedundancyOptimizer: {self._describe(parameter)} was frozen when the optimizer was built and "
                    "is trained now: set requires_grad first, then build the optimizer"
                )
        for bucket in self.buckets:
            for parameter, address in zip(bucket.parameters, bucket.addresses, strict=True):
                if parameter.data_ptr() != address:
                    raise RuntimeError(
                        f"ZeroRedundancyOptimizer: {self._describe(parameter)} was moved after the optimizer was "
                        "built, so what is stepped is not what the model uses: convert first, then build the optimizer"
                    )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. (`set_to_none` is there for the sake of torch's signature.)"""
        if self._reducer.is_open:
            self._reducer.finish() if self._reducer.find_unused else self._reducer.abandon()
        for bucket in self.buckets:
            bucket.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are given when the optimizer is built; later is a RuntimeError."""
        if getattr(self, "_is_built", False):
            raise RuntimeError("ZeroRedundancyOptimizer: shards are laid out already: give all groups when building it")
        super().add_param_group(param_group)

    # --- what is where ---

    def stepped(self, module: nn.Module) -> dict[str, FlatPart]:
        """What `.optim` steps, by the parameters' names in `module`: for snapshots of its state."""
        found: dict[str, FlatPart] = {}
        names = {parameter: name for name, parameter in module.named_parameters()}
        for _, segment in self._segments:
            bucket = segment.bucket
            for index in segment.members:
                parameter = bucket.parameters[index]
                piece = bucket.layout.piece(index, bucket.place)
                placement = Placement(tuple(parameter.shape), segment.tensor.dtype)
                placement = placement.sharded_flat(piece.start, piece.stop, self._axis)
                if parameter in names:
                    found[names[parameter]] = FlatPart(segment.tensor, piece.at - segment.start, placement)
        return found

    def masters(self) -> list[torch.Tensor]:
        """The float32 copies of this rank's part that parameters of 16 bits are stepped in."""
        return [segment.tensor for _, segment in self._segments if segment.has_master]

    def gradients(self) -> list[torch.Tensor]:
        """The tensors that gradients take room in now, for a MemoryLedger to track."""
        held = [tensor for bucket in self.buckets for tensor in (bucket.flat, bucket.reduced) if tensor is not None]
        return held + [output for _, output, _ in self._reducer.under_way]

    def refresh(self) -> None:
        """Take over parameters that something else has set, such as a snapshot, into the float32 copies."""
        for _, segment in self._segments:
            segment.load_values()

    def state_dict(self) -> dict[str, Any]:
        """This rank's own: the state of its part, with float32 copies. (A snapshot is free of the layout.)"""
        self._hand_over_settings()
        return {
            **self.optim.state_dict(),
            "segments": [list(segment.members) for _, segment in self._segments],
            "masters": self.masters(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank of a group of the same size, for the same parameters."""
        wanted = state_dict.get("segments", [])
        if len(wanted) > len(self._segments):  # some were split
            self._segments = [
                (group, one)
                for group, segment in self._segments
                for one in ([segment] if segment.members in wanted else segment.split(self.optim))
            ]
        if [segment.members for _, segment in self._segments] != wanted:
            raise ValueError(
                f"ZeroRedundancyOptimizer: the state is of other parts than rank {self._end.members[self._end.place]} "
                "steps: load what state_dict gave on this rank, with as many ranks, into a new optimizer over the same "
                "parameters, or resume from a snapshot"
            )
        with torch.no_grad():
            for copy, saved in zip(self.masters(), state_dict["masters"], strict=True):
                copy.copy_(saved)
        self.optim.load_state_dict(state_dict)
        self.state = self.optim.state
        for mine, group in zip(self.param_groups, self.optim.param_groups, strict=True):
            mine.update({key: value for key, value in group.items() if key not in ("params", "param_names")})

    def __getstate__(self) -> Any:
        raise TypeError(
            "a ZeroRedundancyOptimizer belongs to its ranks and can't be saved or sent: take its state_dict()"
        )


def _describer(parameters: list[nn.Parameter]) -> Callable[[nn.Parameter], str]:
    numbers = {parameter: number for number, parameter in enumerate(parameters)}

    def describe(parameter: nn.Parameter) -> str:
        return f"parameter {numbers[parameter]} (of shape {list(parameter.shape)})"

    return describe


def _reader(
    me: "weakref.ref[ZeroRedundancyOptimizer]", bucket: ShardedBucket, index: int
) -> Callable[[], torch.Tensor | None]:
    def read() -> torch.Tensor | None:
        optimizer = me()
        if optimizer is not None:
            optimizer._reducer.finish()
        return bucket.gradient(index)

    return read


def _let_go(reducer: ShardReducer, placed: list[tuple[torch.Tensor, Placement]]) -> None:
    reducer.remove()
    for parameter, before in placed:
        disclaim(parameter)
        place(parameter, before)
