"""`DistributedDataParallel`: every rank has the whole model and a share of each batch; gradients are averaged.

Source: S. Li and others, PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from labkit.collectives.groups import endpoint
from labkit.mesh import as_axis
from labkit.mesh.axes import AxisLike
from labkit.parallel.data_parallel.joining import BACKWARD, BUFFERS, Join
from labkit.parallel.data_parallel.marking import mark, unmark
from labkit.parallel.data_parallel.outputs import tensors_in
from labkit.parallel.data_parallel.reducer import Reducer
from labkit.parallel.data_parallel.refusing import refuse_bad
from labkit.parallel.data_parallel.replicas import Packing, broadcast_tensors, check_same_model, pack
from labkit.parallel.data_parallel.structure import Structure
from labkit.parallel.synchronised_norm import SyncBatchNorm


class DistributedDataParallel(nn.Module):
    """Wraps a module so that after backward every rank holds the mean of all ranks' gradients.

    Args:
        module: the same on every rank. Its parameters and buffers are set to those of the group's first rank.
        process_group: the ranks to average over: a group, an axis of a mesh, None for the world.
        bucket_cap_mb: megabytes of gradients (of 2^20 bytes, as PyTorch counts) that travel together. The first bucket
            has 1.
        overlap: reduce in the background while backward computes; False reduces each full bucket in the foreground.
        find_unused_parameters: let a rank leave out parameters that others use. Costs one byte a parameter and step.
        broadcast_buffers: before the first training forward of a step set buffers (BatchNorm's statistics) to the
            first rank's.
        algorithm: of the all-reduce.

    The mean weighs ranks alike. Where shares differ, multiply each rank's loss sum by N / (weight of the whole batch).
    Whether a backward averages is decided by its forward: one inside `no_sync()`, and one of `.module` itself, does
    not; `torch.autograd.grad` never does. After the first backward the buckets are rebuilt once in the order in which
    gradients were ready. Gradients live in the buckets: the next step overwrites them, so clone what you keep.

    A wrong argument or model is a ValueError or TypeError, a difference between the ranks a RuntimeError.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: AxisLike = None,
        bucket_cap_mb: float = 25,
        overlap: bool = True,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        algorithm: str = "ring",
    ) -> None:
        super().__init__()
        refuse_bad(module, bucket_cap_mb, algorithm)
        self._options: dict[str, Any] = {
            "cap_bytes": bucket_cap_mb * (1 << 20),
            "overlap": overlap,
            "find_unused": find_unused_parameters,
            "algorithm": algorithm,
        }
        self._axis, self._broadcast_buffers = as_axis(process_group), broadcast_buffers
        self._end = endpoint(self._axis.group)
        self._device = next(module.parameters()).device
        check_same_model(module, self._end, device=self._device)
        broadcast_tensors([*module.parameters(), *module.buffers()], self._end)
        self._wrap(module)

    def _wrap(self, module: nn.Module) -> None:
        """Everything that sends nothing."""
        self.module, self.process_group = module, self._end.group
        self._sync = self._buffers_due = True
        self._join: Join | None = None
        self._structure = Structure(module)
        self._packed: list[tuple[int, int]] = []  # identities of the buffers that `_packings` hold
        self._packings: list[Packing] = []
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        me = weakref.ref(self)
        self._reducer = Reducer(named, self._end, before_first=_announce_backward(me), **self._options)
        placed = mark(module, self._axis)
        weakref.finalize(self, _unwrap, self._reducer, placed).atexit = False
        self.register_load_state_dict_pre_hook(_add_module_to_names)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module's forward returns. Whether the backward that follows averages is decided here."""
        endpoint(self.process_group)  # refused where the ranks have been restarted
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        find_unused = self._reducer.find_unused
        averages = self._structure.check(may_freeze=find_unused) and self._sync
        if averages:
            self._reducer.expect()
        if self.training and self._broadcast_buffers:
            if self._buffers_due and self._structure.buffers():
                self._announce(BUFFERS)
                self.broadcast_buffers()
            self._buffers_due = averages
        output = self.module(*inputs, **kwargs)
        begin = _begin(self, averages)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begin)
        return output

    def _announce(self, what: str) -> None:
        if self._join is not None:
            self._join.announce(what)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside only accumulate gradients on each rank; the next backward outside averages their sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def join(self) -> AbstractContextManager[None]:
        """Let ranks run out of batches at different times: those that are through take part with zeros until the last
        one is. In the end all take the parameters of a rank that was there to the last step."""
        for name, module in self.module.named_modules():
            if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
                raise ValueError(
                    f"join: {name} normalises over all ranks, and one that is through can't take part in it: use "
                    "BatchNorm or GroupNorm, or equal numbers of batches"
                )
        return Join(self).run()

    def broadcast_buffers(self) -> None:
        """Set the module's buffers to those of the group's first rank."""
        buffers = self._structure.buffers()
        marks = [(id(buffer), buffer.data_ptr()) for buffer in buffers]
        if marks != self._packed:
            self._packed, self._packings = marks, pack(buffers)
        with torch.no_grad():
            for packing in self._packings:
                packing.broadcast(self._end, 0)

    @property
    def bucket_bytes(self) -> list[int]:
        """The size of each bucket, in the order in which they are reduced."""
        return [bucket.flat.numel() * bucket.flat.element_size() for bucket in self._reducer.buckets]

    # the names of a checkpoint are the model's own

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the module's state, under the module's own names."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        """A copy of the module, wrapped alike; nothing is sent."""
        other = type(self).__new__(type(self))
        nn.Module.__init__(other)
        memo[id(self)] = other
        for name in ("_options", "_axis", "_broadcast_buffers", "_end", "_device"):
            setattr(other, name, getattr(self, name))
        other._wrap(copy.deepcopy(self.module, memo))
        return other.train(self.training)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedDataParallel belongs to its ranks and can't be saved or sent: take its state_dict(), or "
            "its .module"
        )


def _add_module_to_names(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Where the wrapper is a part of a larger module, that one loads by our attribute's name."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _announce_backward(me: "weakref.ref[DistributedDataParallel]") -> Callable[[], None]:
    def announce() -> None:
        wrapper = me()
        if wrapper is not None:
            wrapper._announce(BACKWARD)

    return announce


def _begin(wrapper: DistributedDataParallel, averages: bool) -> Callable[[torch.Tensor], None]:
    me = weakref.ref(wrapper)
    # a wrapper that nobody else holds must last until backward; after it the graph lets go, since a module that keeps
    # its output would hold itself for ever
    held = [wrapper] if averages else []

    def begin(_: torch.Tensor) -> None:
        living = me()
        if living is not None:
            living._reducer.begin(averages=averages, keep=held)

    return begin


def _unwrap(reducer: Reducer, placed: Any) -> None:
    reducer.remove()
    unmark(placed)
