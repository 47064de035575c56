"""Gradient accumulation: one step's gradient from micro-batches, one after the other, with the memory of one of them.

The gradient of a sum is the sum of the gradients, and `backward` adds to what is in `grad`. So k micro-batches give the
gradient of their union, where each one's loss sum is divided by the weight of the whole step, all micro-batches and all
ranks together: the mean of k means is another number as soon as they weigh differently. Source of the deferred
reduction: S. Li and others, PyTorch Distributed (VLDB 2020), section 3.2.4.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.collectives import ReduceOp, all_reduce
from labkit.memory.weighing import Loss, checked_pair, weigh
from labkit.mesh import as_axis
from labkit.record import span


class Scaler(Protocol):
    """What accumulation asks of a gradient scaler."""

    def scale(self, loss: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Accumulated:
    """What a step's micro-batches came to: the sum of this rank's losses (detached), their weight, and the weight of
    all ranks together. The mean loss of the step is the ranks' loss sums over `global_weight`."""

    loss_sum: Tensor
    weight: float
    global_weight: float


def accumulate(
    wrapped: Callable[[Any], Any],
    micro_batches: Iterable[tuple[Any, Any]],
    loss: Loss,
    *,
    scaler: Scaler | None = None,
    weight: Callable[[Any], Any] | None = None,
    reducer: Any = None,
) -> Accumulated:
    """Leave the gradient of the mean loss over all micro-batches of all ranks in `grad`, added to what is there.

    Each loss sum is divided by the step's global weight, for which the ranks exchange 16 bytes before the first
    forward, and multiplied by the number of ranks, by which a wrapper divides. All but the last micro-batch run in
    `no_sync()`, so that gradients are reduced once, in the last backward, whatever the number of micro-batches. Ranks
    may have different numbers of them, one at least, unless they meet in every forward, as in SyncBatchNorm and in
    `fully_shard`.

    Args:
        wrapped: what is trained: a plain module, or one whose wrapper has `no_sync()` and `process_group`.
        micro_batches: pairs of (inputs, targets); `wrapped(inputs)` gives the output. A generator is read to its end
            first, since the weights are needed: inputs and targets are held all at once, activations one at a time.
        loss: loss(output, targets) returns the sum and its weight, the number of samples or valid tokens.
        scaler: its `scale(loss)` is what backward starts from. Unscale before clipping, and step by the scaler.
        weight: weight(targets), the weight that `loss` will return. Where it is not given, `loss` is asked beforehand
            with a stand-in for the output, and where it can't do without one, after a forward without gradient.
        reducer: what has `no_sync()` and `process_group` where that isn't `wrapped`, as an optimizer that reduces.

    BatchNorm takes its statistics from one micro-batch at a time, and dropout draws a mask for each: with them the
    result is that of the micro-batches, not that of the whole batch.

    Raises ValueError or TypeError, in one sentence, where there is nothing to accumulate, nothing that counts, no pair
    where one is needed, or a weight that depends on the output; RuntimeError where a loss has no graph.
    """
    if not (hasattr(micro_batches, "__iter__") and callable(wrapped) and callable(loss)):
        kinds = ", ".join(type(one).__name__ for one in (wrapped, micro_batches, loss))
        raise TypeError(f"accumulate: given {kinds}: give a module, pairs of (inputs, targets), and a loss function")
    parts = [_pair(part, number) for number, part in enumerate(micro_batches)]
    reduces = wrapped if reducer is None else reducer
    no_sync = getattr(reduces, "no_sync", None)
    if reducer is not None and no_sync is None:
        raise TypeError(f"accumulate: reducer is a {type(reducer).__name__} without no_sync(): give what reduces")
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        mine = [weigh(wrapped, part, loss, weight, number) for number, part in enumerate(parts)]
    device = _device(wrapped)
    everyones, size = sum(mine), 1
    missing = int(not parts)
    if no_sync is not None and dist.is_initialized():
        axis = as_axis(getattr(reduces, "process_group", None))
        size = axis.size
        told = torch.tensor([everyones, missing], dtype=torch.float64, device=device)
        all_reduce(told, ReduceOp.SUM, axis.group)
        everyones, missing = told[0].item(), int(told[1])
    if missing:
        who = "there are no micro-batches" if size == 1 else f"{missing} of {size} ranks have no micro-batches"
        raise ValueError(f"accumulate: {who}: give each rank one at least, if need be one whose targets don't count")
    if not everyones > 0:
        raise ValueError(
            f"accumulate: the weight of all micro-batches{' of all ranks' if size > 1 else ''} is {everyones:g}, so "
            "that their mean loss is not defined: is every target one that is ignored?"
        )
    sums = add_gradients(wrapped, parts, loss, size / everyones, no_sync=no_sync, scaler=scaler)
    told_after = float(sum(float(one) for _, one in sums))
    if told_after != sum(mine):
        who = "loss(), asked without an output," if weight is None else "weight="
        raise ValueError(
            f"accumulate: {who} says that this rank's micro-batches weigh {sum(mine):g}, loss() says {told_after:g}: "
            "give as weight= a function of the targets that counts as the loss does"
        )
    return Accumulated(torch.stack([total.detach() for total, _ in sums]).sum(), told_after, everyones)


def add_gradients(
    forward: Callable[[Any], Any],
    micro_batches: Sequence[tuple[Any, Any]],
    loss: Loss,
    factor: float,
    *,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
    scaler: Scaler | None = None,
) -> list[tuple[Tensor, Any]]:
    """Forward and backward of each micro-batch, its loss sum multiplied by `factor`; all but the last in `no_sync()`.
    Returns what `loss` returned of each, without its graph."""
    sums: list[tuple[Tensor, Any]] = []
    for number, (inputs, targets) in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        # it is in the forward that a wrapper decides whether the backward reduces
        with nullcontext() if last or no_sync is None else no_sync():
            with span("forward", "forward"):
                output = forward(inputs)
                total, weight = checked_pair(loss(output, targets), number)
                _refuse_what_has_no_backward(total, number)
            with span("backward", "backward"):
                scaled = total * factor
                (scaled if scaler is None else scaler.scale(scaled)).backward()
        sums.append((total.detach(), weight))
        del output, total, scaled  # or the last graph would live through the next forward
    return sums


def _pair(part: Any, number: int) -> tuple[Any, Any]:
    if not isinstance(part, tuple | list) or len(part) != 2:
        what = f"{len(part)} things" if isinstance(part, tuple | list) else f"a {type(part).__name__}"
        raise TypeError(f"accumulate: micro-batch {number} is {what}: give pairs of (inputs, targets)")
    return part[0], part[1]


def _refuse_what_has_no_backward(total: Any, number: int) -> None:
    if not isinstance(total, Tensor) or total.numel() != 1:
        what = f"of shape {list(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise TypeError(
            f"accumulate: the loss sum of micro-batch {number} is {what}: return one number in a tensor, as "
            'reduction="sum" gives'
        )
    if not total.requires_grad:
        raise RuntimeError(
            f"accumulate: the loss sum of micro-batch {number} has no graph to run backward through: is it detached, "
            "every parameter frozen, or gradients turned off by torch.no_grad()?"
        )


def _device(wrapped: Any) -> torch.device:
    parameters = wrapped.parameters() if isinstance(wrapped, torch.nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
