"""The conjugate pairs: what a tensor needs where it enters a part of the network that ranks share, and where it leaves.

Each does one thing forward and the other backward. *in* is into the shared part, *out* is out of it. A tensor that is
replicated enters by `copy_in` and leaves by `reduce_out` or `gather_out`; one that is in shards of the sequence enters
by `gather_in` and leaves by `scatter_out`. None changes its input.

Source: Shoeybi and others, Megatron-LM (2019), arXiv:1909.08053, section 3 (f and g); Korthikanti and others, Reducing
Activation Recomputation in Large Transformer Models (2022), arXiv:2205.05198, section 4.2.2 (g and g-bar).
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.mesh import Axis, as_axis
from labkit.mesh.axes import AxisLike
from labkit.parallel.tensor.dims import all_reduced, gathered_along, part_of, reduced_part


class _CopyIn(Function):
    """Forward: a copy (nothing is sent). Backward: an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduced(gradient, ctx.axis), None


class _ReduceOut(Function):
    """Forward: an all-reduce. Backward: a copy (nothing is sent)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduced(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.view_as(gradient), None


class _ScatterIn(Function):
    """Forward: this rank's part (nothing is sent). Backward: an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis, ctx.total = dim, axis, x.shape[dim]
        return part_of(x, dim, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered_along(gradient, ctx.dim, ctx.axis, ctx.total), None, None


class _GatherOut(Function):
    """Forward: an all-gather. Backward: this rank's part (nothing is sent)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis, total: int | None) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return gathered_along(x, dim, axis, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return part_of(gradient, ctx.dim, ctx.axis), None, None, None


class _GatherIn(Function):
    """Forward: an all-gather. Backward: a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis, total: int | None) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return gathered_along(x, dim, axis, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return reduced_part(gradient, ctx.dim, ctx.axis), None, None, None


class _ScatterOut(Function):
    """Forward: a reduce-scatter. Backward: an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis, ctx.total = dim, axis, x.shape[dim]
        return reduced_part(x, dim, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered_along(gradient, ctx.dim, ctx.axis, ctx.total), None, None


def copy_in(x: Tensor, group: AxisLike = None) -> Tensor:
    """Copy / all-reduce: a replicated tensor enters, so that its gradient is the sum over the ranks' parts."""
    axis = as_axis(group)
    return x if axis.size == 1 else _CopyIn.apply(x, axis)


def reduce_out(x: Tensor, group: AxisLike = None) -> Tensor:
    """All-reduce / copy: partial sums leave as their sum, on every rank."""
    axis = as_axis(group)
    return x if axis.size == 1 else _ReduceOut.apply(x, axis)


def scatter_in(x: Tensor, dim: int, group: AxisLike = None) -> Tensor:
    """Scatter / all-gather: of a replicated tensor each rank goes on with its part of `dim`."""
    axis = as_axis(group)
    return x if axis.size == 1 else _ScatterIn.apply(x, dim, axis)


def gather_out(x: Tensor, dim: int, group: AxisLike = None, *, total: int | None = None) -> Tensor:
    """All-gather / scatter: parts along `dim` leave as the whole, which every rank goes on with in the same way.

    `total` is the whole length of `dim`, for parts that differ; N times the part's if not given.
    """
    axis = as_axis(group)
    return x if axis.size == 1 else _GatherOut.apply(x, dim, axis, total)


def gather_in(x: Tensor, dim: int, group: AxisLike = None, *, total: int | None = None) -> Tensor:
    """All-gather / reduce-scatter: parts along `dim` enter as the whole, of which each rank uses something else.

    `total` as for `gather_out`.
    """
    axis = as_axis(group)
    return x if axis.size == 1 else _GatherIn.apply(x, dim, axis, total)


def scatter_out(x: Tensor, dim: int, group: AxisLike = None) -> Tensor:
    """Reduce-scatter / all-gather: partial sums leave as their sum, of which each rank has its part of `dim`."""
    axis = as_axis(group)
    return x if axis.size == 1 else _ScatterOut.apply(x, dim, axis)
