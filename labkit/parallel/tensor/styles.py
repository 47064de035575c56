"""A style says how one module of the network is shared: which of its parameters are cut, and what happens around it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.mesh import Axis, place, placement_of
from labkit.parallel.tensor.conjugates import copy_in, gather_in, scatter_in
from labkit.parallel.tensor.kept_shards import gather_and_keep_shard
from labkit.parallel.tensor.layers import check_divides
from labkit.parallel.tensor.layouts import Layout, Replicate, Shard

KEEPS = ("gathered", "shards")


@dataclass(frozen=True)
class Cut:
    """One parameter or buffer that is cut along `dim`: the attribute `name` of `module`."""

    module: nn.Module
    name: str
    dim: int

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.module, self.name)
        return found

    def perform(self, axis: Axis) -> None:
        """Keep this rank's slice, in the same tensor object, so that ties and hooks stay; and place it."""
        tensor = self.tensor
        placement = placement_of(tensor).sharded(self.dim, axis)
        full = tensor.detach()
        start, stop = placement.slices[self.dim]
        tensor.data = full.narrow(self.dim, start, stop - start).clone(memory_format=torch.contiguous_format)
        tensor.grad = None
        place(tensor, placement)


class ParallelStyle:
    """What `parallelize_module` asks of a style; all of it is asked before anything is changed."""

    def cuts(self, module: nn.Module, name: str, axis: Axis) -> list[Cut]:
        """The parameters and buffers to cut. Raises ValueError, in one sentence, where the module does not fit."""
        return []

    def install(self, module: nn.Module, axis: Axis) -> None:
        """Change the module, whose parameters are cut by now."""


def cut_if_there(module: nn.Module, names: dict[str, int]) -> list[Cut]:
    """Cuts of those of the named tensors that the module has, each along its dim."""
    return [Cut(module, name, dim) for name, dim in names.items() if getattr(module, name, None) is not None]


def does_not_fit(style: ParallelStyle, module: nn.Module, name: str, takes: str) -> ValueError:
    kind = type(module).__name__
    return ValueError(f"{type(style).__name__}: {name or 'the module'} is a {kind}; this style takes {takes}")


class Entering:
    """A hook before forward: the first argument enters the part that ranks share."""

    def __init__(self, layout: Layout, keep: str, axis: Axis) -> None:
        self.layout, self.keep, self.axis = layout, keep, axis

    def enter(self, x: Tensor) -> Tensor:
        if isinstance(self.layout, Replicate):
            return copy_in(x, self.axis)
        if self.keep == "shards":
            return gather_and_keep_shard(x, self.layout.dim, self.axis)
        return gather_in(x, self.layout.dim, self.axis)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.enter(args[0]), *args[1:]

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The same behind a module whose output enters."""
        return self.enter(output)


class Changed:
    """A hook before or after forward: `change` is applied to the first argument, or to the output."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.change(args[0]), *args[1:]

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self.change(output)


class EvenShard:
    """This rank's shard of a replicated tensor along `dim`, which must divide."""

    def __init__(self, dim: int, axis: Axis) -> None:
        self.dim, self.axis = dim, axis

    def __call__(self, x: Tensor) -> Tensor:
        check_divides(x.shape[self.dim], self.axis, "a sequence")
        return scatter_in(x, self.dim, self.axis)


def checked_keep(keep: str) -> str:
    if keep not in KEEPS:
        raise ValueError(f"keep is {keep!r}; give 'gathered' or 'shards'")
    return keep


def features(layout: Layout, module: nn.Module) -> bool:
    """Whether the layout is a shard of the features: the last dim of a linear layer's data, dim 1 of images."""
    dim = 1 if isinstance(module, nn.Conv2d) else -1
    return isinstance(layout, Shard) and layout.dim == dim
