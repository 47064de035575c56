"""`DistributedDataParallel`: every rank has the whole model and a share of each batch; gradients are averaged.

Source: S. Li and others, PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from labkit.collectives.groups import Group, endpoint
from labkit.mesh import Placement, place
from labkit.parallel.data_parallel.joining import Join
from labkit.parallel.data_parallel.reducer import Reducer
from labkit.parallel.data_parallel.replicas import broadcast_tensors, check_same_shapes

#: parameters under a wrapper, so that a second one, or an optimizer that reduces by itself, can refuse them
_wrapped = WeakTensorKeyDictionary()


def is_wrapped(parameter: nn.Parameter) -> bool:
    """Whether a living DistributedDataParallel averages this parameter's gradient."""
    return parameter in _wrapped


class DistributedDataParallel(nn.Module):
    """Wraps a module so that after backward every rank holds the mean of all ranks' gradients.

    Args:
        module: the same on every rank. Its parameters and buffers are set to those of the group's first rank.
        process_group: the ranks to average over; None means the world.
        bucket_cap_mb: megabytes (1e6 x 1.048576 bytes) of gradients that travel together. The first bucket has 1.
        overlap: reduce in the background while backward computes; False reduces each full bucket in the foreground.
        find_unused_parameters: let a rank leave out parameters that others use. Costs one byte a parameter and step.
        broadcast_buffers: set buffers (BatchNorm's statistics) to the first rank's before each forward in training.
        algorithm: of the all-reduce.

    The mean weighs ranks alike. Where shares differ, multiply each rank's loss sum by N / (weight of the whole batch).
    After the first backward the buckets are rebuilt once in the order in which gradients were ready.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: Group = None,
        bucket_cap_mb: float = 25,
        overlap: bool = True,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        algorithm: str = "ring",
    ) -> None:
        super().__init__()
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        _refuse(named, bucket_cap_mb)
        end = endpoint(process_group)
        check_same_shapes(module, end)
        broadcast_tensors([*module.parameters(), *module.buffers()], end)
        self.module, self.process_group = module, end.group
        self._end, self._broadcast_buffers = end, broadcast_buffers
        self._sync = True
        self._join: Join | None = None
        self._homes = [
            (owner, name, p) for owner in module.modules() for name, p in owner._parameters.items() if p is not None
        ]
        self._reducer = Reducer(
            named,
            end,
            cap_bytes=int(bucket_cap_mb * (1 << 20)),
            overlap=overlap,
            find_unused=find_unused_parameters,
            algorithm=algorithm,
        )
        for parameter in module.parameters():
            place(parameter, Placement.of(parameter).replicated(end.group))
        for parameter in named.values():
            _wrapped[parameter] = True
        weakref.finalize(self, _unwrap, self._reducer, list(named.values()))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module's forward returns. Whether the backward that follows averages is decided here."""
        for owner, name, parameter in self._homes:
            if owner._parameters.get(name) is not parameter:
                raise RuntimeError(
                    f"DistributedDataParallel: parameter {name!r} of {type(owner).__name__} was replaced after "
                    "wrapping, so its gradient would not be averaged: replace parameters first, then wrap"
                )
        training = torch.is_grad_enabled() and self.training
        if training:
            if self._join is not None:
                self._join.announce(sync=self._sync)
            self._reducer.prepare(enabled=self._sync)
            if self._sync and self._broadcast_buffers:
                self.broadcast_buffers()
        output = self.module(*inputs, **kwargs)
        if training and self._sync:
            begin = _begin(weakref.ref(self._reducer))
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(begin)
        return output

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
        return Join(self).run()

    def broadcast_buffers(self) -> None:
        """Set the module's buffers to those of the group's first rank."""
        broadcast_tensors(list(self.module.buffers()), self._end)

    # the names of a checkpoint are the model's own

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the module's state, under the module's own names."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)


def _refuse(named: dict[str, nn.Parameter], bucket_cap_mb: float) -> None:
    if not named:
        raise ValueError("DistributedDataParallel: no parameter needs a gradient, so there is nothing to average")
    if not bucket_cap_mb > 0:
        raise ValueError(f"DistributedDataParallel: bucket_cap_mb is {bucket_cap_mb!r}; give megabytes above 0")
    for name, parameter in named.items():
        if is_wrapped(parameter):
            raise ValueError(f"DistributedDataParallel: parameter {name} is wrapped already; wrap a module once")
        if parameter.is_sparse or parameter.is_meta:
            raise ValueError(f"DistributedDataParallel: parameter {name} is sparse or has no data; give it dense data")


def _begin(reducer: "weakref.ref[Reducer]") -> Callable[[torch.Tensor], None]:
    def begin(_: torch.Tensor) -> None:
        living = reducer()
        if living is not None:
            living.begin()

    return begin


def _unwrap(reducer: Reducer, parameters: list[nn.Parameter]) -> None:
    reducer.remove()
    for parameter in parameters:
        _wrapped.pop(parameter, None)
