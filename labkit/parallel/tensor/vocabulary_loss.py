"""`loss_parallel`: cross-entropy of logits of which each rank has a slice of the vocabulary; they are never gathered.

With z the logits [n, C] of n targets t: -log softmax(z)_t = log(sum exp(z - m)) - (z_t - m), m the largest of a row.
Two all-reduces do: the largest, n numbers, and the sums, 2 n numbers (3 n with label smoothing). Nothing is sent in
backward, where the gradient softmax(z) - onehot(t) of a slice needs the slice alone.

Source: Shoeybi and others, Megatron-LM (2019), arXiv:1909.08053, section 3, on the output embedding; label
smoothing: Szegedy and others (2016), arXiv:1512.00567, section 7.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from labkit.collectives import ReduceOp, all_reduce
from labkit.mesh import Axis, as_axis
from labkit.mesh.axes import AxisLike


@contextmanager
def loss_parallel(*, group: AxisLike = None) -> Iterator[None]:
    """A context manager in which F.cross_entropy takes this rank's slice of the logits, and returns the whole loss.

    The classes are the logits' dim 1, or the only one: [C / N], [n, C / N] or [n, C / N, ...]. Slices may differ in
    length; they follow one another in the order of ranks. Targets are class numbers of the whole vocabulary, the same
    on every rank. `ignore_index`, `reduction`, `label_smoothing` and class weights, of all classes, work as in PyTorch.
    The loss is the same on every rank, to the last bit.

    `group`: the ranks that have the slices; None means the world. All of them call F.cross_entropy together. Backward
    may run inside or outside.
    """
    axis = as_axis(group)
    if axis.size == 1:
        yield
        return
    with _Mode(axis):
        yield


_REDUCTIONS = ("none", "mean", "sum")


class _Mode(TorchFunctionMode):
    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.cross_entropy:
            return _cross_entropy(self.axis, *args, **(kwargs or {}))
        if func is torch._C._nn.cross_entropy_loss:  # what it calls, where a mode inside of this one has opened it
            input, target, weight, reduction, ignored, smoothing = args
            options = {"ignore_index": ignored, "reduction": _REDUCTIONS[reduction], "label_smoothing": smoothing}
            return _cross_entropy(self.axis, input, target, weight, **options)
        return func(*args, **(kwargs or {}))


def _cross_entropy(
    axis: Axis,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if size_average is not None or reduce is not None:
        raise ValueError("loss_parallel: size_average and reduce are replaced by reduction; give that")
    if target.is_floating_point():
        raise ValueError("loss_parallel: the targets are probabilities; give class numbers, int64")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"loss_parallel: reduction is {reduction!r}; give 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"loss_parallel: label_smoothing is {label_smoothing}; give 0 to 1")
    dim = 0 if input.dim() == 1 else 1
    rest = input.shape[:dim] + input.shape[dim + 1 :]
    if target.shape != rest:
        raise ValueError(
            f"loss_parallel: logits {list(input.shape)}, classes in dim {dim}, need targets {list(rest)}, not "
            f"{list(target.shape)}"
        )
    logits = input.movedim(dim, -1).reshape(target.numel(), input.shape[dim])
    flat = target.reshape(-1)
    losses: Tensor
    weights: Tensor
    losses, weights = _Losses.apply(logits, flat, weight, ignore_index, label_smoothing, axis)
    if reduction == "none":
        return losses.view(target.shape).to(input.dtype)
    return (losses.sum() if reduction == "sum" else losses.sum() / weights.sum()).to(input.dtype)


class _Losses(Function):
    """Each target's loss [n], and the weight it has in a mean [n]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float, axis: Axis
    ) -> tuple[Tensor, Tensor]:
        count, width = logits.shape
        exact = logits.detach().float() if logits.dtype.itemsize < 4 else logits.detach()
        # the largest of each row, and behind them each rank's width: one message
        largest = exact.new_full((count + axis.size,), -torch.inf)
        if width:
            largest[:count] = exact.amax(1)
        largest[count + axis.coordinate] = width
        all_reduce(largest, ReduceOp.MAX, axis.group)
        widths = [int(one) for one in largest[count:].tolist()]
        classes, first = sum(widths), sum(widths[: axis.coordinate])
        _check_targets(target, classes, ignored)

        shifted = exact - largest[:count, None]
        local = target - first
        here = (local >= 0) & (local < width)
        at = local.masked_fill(~here, 0).unsqueeze(1)
        slice_of_weight = None if weight is None else _checked(weight, classes)[first : first + width].to(exact.dtype)
        sums = exact.new_zeros(3 if smoothing else 2, count)
        if width:
            sums[1] = shifted.gather(1, at).squeeze(1).masked_fill_(~here, 0)
            if smoothing:
                sums[2] = shifted.sum(1) if slice_of_weight is None else shifted @ slice_of_weight
        softmax = shifted.exp_()
        sums[0] = softmax.sum(1)
        all_reduce(sums, group=axis.group)
        softmax.div_(sums[0, :, None])

        kept = (target != ignored).to(exact.dtype)
        weights, total = kept, float(classes)
        if weight is not None:
            weights = kept * weight.to(exact.dtype)[target.masked_fill(target == ignored, 0)]
            total = float(weight.sum())
        logs = sums[0].log()
        losses = weights * (logs - sums[1])
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing / classes * kept * (total * logs - sums[2])
        ctx.save_for_backward(softmax, at, here, weights, kept, slice_of_weight)
        ctx.smoothing, ctx.classes, ctx.total, ctx.dtype = smoothing, classes, total, logits.dtype
        ctx.mark_non_differentiable(weights)
        return losses, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        softmax, at, here, weights, kept, weight = ctx.saved_tensors
        gradient = gradient.to(softmax.dtype)
        hit = (1 - ctx.smoothing) * weights
        share = ctx.smoothing / ctx.classes * kept
        result = softmax * (gradient * (hit + share * ctx.total))[:, None]
        if result.shape[1]:
            result.scatter_add_(1, at, -(gradient * hit * here)[:, None])
        if ctx.smoothing:
            result -= (gradient * share)[:, None] * (1 if weight is None else weight)
        return result.to(ctx.dtype), None, None, None, None, None


def _checked(weight: Tensor, classes: int) -> Tensor:
    if weight.shape != (classes,):
        raise ValueError(f"loss_parallel: weight has shape {list(weight.shape)}; give one for all classes, [{classes}]")
    return weight


def _check_targets(target: Tensor, classes: int, ignored: int) -> None:
    bad = (target != ignored) & ((target < 0) | (target >= classes))
    if bad.any():
        raise ValueError(
            f"loss_parallel: target {int(target[bad][0])} is outside of the {classes} classes of all ranks"
        )


def parallel_argmax(logits: Tensor, group: AxisLike = None) -> Tensor:
    """The class with the largest logit [...], from this rank's slice [..., C / N]; the first of several equal ones."""
    axis = as_axis(group)
    if axis.size == 1:
        return logits.argmax(-1)
    exact = logits.detach().double()
    ends = torch.full((axis.size,), 0, dtype=torch.float64, device=logits.device)
    ends[axis.coordinate] = logits.shape[-1]
    all_reduce(ends, group=axis.group)
    first, width = int(ends[: axis.coordinate].sum()), logits.shape[-1]
    mine = exact.amax(-1) if width else exact.new_full(exact.shape[:-1], -torch.inf)
    largest = mine.clone()
    all_reduce(largest, ReduceOp.MAX, axis.group)
    place = first + logits.argmax(-1) if width else torch.zeros(exact.shape[:-1], dtype=torch.int64)
    chosen = torch.where(mine == largest, place, torch.iinfo(torch.int64).max)
    all_reduce(chosen, ReduceOp.MIN, axis.group)
    return chosen
