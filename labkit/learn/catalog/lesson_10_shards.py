"""Lesson 10: cross-entropy of a vocabulary in slices, and the gradients of norms that are forgotten."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.learn.catalog.lesson_10 import ITEMSIZE, near, part
from labkit.learn.catalog_values import drawn
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent
from labkit.words import _

ROWS, CLASSES = 5, 12


# --- vocabulary-parallel cross-entropy ---


def targets() -> Any:
    import torch

    return torch.tensor([0, 11, 5, 6, 2])


def logits_of(scale: float) -> Any:
    return scale * drawn(120, ROWS, CLASSES) + (500 * (scale > 1)) * drawn(121, ROWS, 1).abs()


def loss_inputs(rank: int, world_size: int, *, scale: float) -> tuple[Any, ...]:
    """This rank's logits [n, C / N], the targets [n], and the first class that this rank has."""
    return part(logits_of(scale), 1, rank, world_size), targets(), rank * CLASSES // world_size


def drive_loss(function: Callable[..., Any], logits: Any, target: Any, first: int) -> Any:
    import torch

    value = function(logits.clone(), target.clone(), first)
    if not isinstance(value, torch.Tensor) or value.shape != target.shape:
        raise Nonsense(describe(value), _("a tensor of shape {shape}, a loss for each row").format(shape=(ROWS,)))
    return value.detach(), float(logits.abs().max()) > 100


def right_losses(large: bool, outcome: Outcome) -> Finding:
    """In the trials with large logits, or with small ones."""
    import torch
    import torch.nn.functional as F

    whole = torch.cat([outcome.inputs(rank)[0] for rank in range(outcome.world_size)], 1)
    if bool(outcome.values[0][1]) is not large:
        return Finding(True)
    wanted = F.cross_entropy(whole, targets(), reduction="none")
    for one in outcome.ranks:
        found = one.value[0]
        if torch.allclose(found, wanted, rtol=1e-4, atol=1e-3 if large else 1e-5):
            continue
        cause = _loss_cause(found, whole, outcome.inputs(one.rank))
        if not torch.isfinite(found).all():
            cause = _("exp of a large number overflows: subtract the largest logit of the row first")
        told = _("rank {rank}: {first:.4g}, ...").format(rank=one.rank, first=float(found[0]))
        return Finding(False, _("{first:.4g}, ...").format(first=float(wanted[0])), told, cause)
    return Finding(True)


def _loss_cause(found: Any, whole: Any, given: tuple[Any, ...]) -> str:
    import torch

    logits, target, first = given
    there = (target >= first) & (target < first + logits.shape[1])
    at = (target - first).clamp(0, logits.shape[1] - 1)[:, None]
    mine = logits.gather(1, at)[:, 0]
    if near(found, whole.logsumexp(1) - mine) or near(found[there], (whole.logsumexp(1) - mine)[there]):
        return _("the target's logit is on one rank only: the others count 0, and a sum joins them")
    if near(found, logits.logsumexp(1) - whole.gather(1, target[:, None])[:, 0]):
        return _("the sum of exp is over this rank's classes only")
    width = logits.shape[1]
    shifted = whole - whole.amax(1, keepdim=True)
    starts = range(0, whole.shape[1], width)
    clamped = [(start + (target - start).clamp(0, width - 1))[:, None] for start in starts]
    if near(found, shifted.logsumexp(1) - sum(shifted.gather(1, place)[:, 0] for place in clamped)):
        return _("a rank that has not got the target adds a logit of another class: a mask must make it 0")
    if torch.isfinite(found).all():
        return _("each rank subtracts its own largest logit: it must be one number for all slices of a row")
    return ""


def at_most_three(outcome: Outcome) -> Finding:
    from labkit.collectives.formulas import all_reduce_sent

    most = 3 * ROWS
    for one in outcome.ranks:
        allowed = max(all_reduce_sent("ring", most, ITEMSIZE, outcome.world_size).bytes) + 3 * ITEMSIZE
        if one.record.bytes_sent > allowed:
            wanted = _("at most 3 numbers a row in all-reduces, {count} bytes").format(count=allowed)
            told = _("rank {rank}: {count} bytes").format(rank=one.rank, count=one.record.bytes_sent)
            return Finding(False, wanted, told, _("whole logits travel: only sums and the largest must"))
    return Finding(True)


def sliced_loss(logits: Any, target: Any, first: int, *, slip: str = "") -> Any:
    """The solution, and what goes wrong with it."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from labkit.collectives import ReduceOp, all_gather_into_tensor, all_reduce

    if slip == "gathers":
        parts = torch.empty(dist.get_world_size(), *logits.shape)
        all_gather_into_tensor(parts, logits)
        return F.cross_entropy(parts.movedim(0, 1).flatten(1), target, reduction="none")
    largest = logits.amax(1)
    if slip == "no largest":
        largest = torch.zeros_like(largest)
    elif slip != "own largest":
        all_reduce(largest, ReduceOp.MAX)
    shifted = logits - largest[:, None]
    sums = shifted.exp().sum(1)
    if slip != "own sum":
        all_reduce(sums)
    local = target - first
    here = (local >= 0) & (local < logits.shape[1])
    mine = shifted.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    if slip != "no mask":
        mine = mine * here
    if slip != "own target":
        all_reduce(mine)
    return sums.log() - mine


register(
    Exercise(
        id="vocabulary-loss",
        lesson="10",
        title=_("Cross-entropy of a vocabulary in slices"),
        dots=3,
        minutes=15,
        answer="sliced_cross_entropy",
        hints=(
            _("The loss is log(sum exp(z - m)) - (z_t - m). Which of m, the sum and z_t can one rank know alone?"),
            _("Three small all-reduces: MAX of the largest, SUM of the sums of exp, SUM of the targets' logits."),
            _("A rank without the target adds 0: `local = target - first`, a mask, `gather` of `local.clamp(...)`."),
        ),
        properties=(
            Property("loss", _("each row's loss is that of the whole logits"), partial(right_losses, False)),
            Property("large", _("also where the logits are large"), partial(right_losses, True)),
            Property("bytes", _("three numbers a row are sent, not the logits"), at_most_three),
        ),
        trials=tuple(
            Trial(
                _("{ranks} ranks, {kind} logits").format(ranks=ranks, kind=kind), ranks,
                partial(loss_inputs, scale=scale), drive_loss, ("logits", "target", "first"),
            )
            for ranks, kind, scale in ((2, _("small"), 1.0), (4, _("small"), 1.0), (2, _("large"), 50.0))
        ),
        wrong_answers=(
            WrongAnswer("gathers the logits", partial(sliced_loss, slip="gathers"), "bytes", "whole logits travel"),
            WrongAnswer("own sum", partial(sliced_loss, slip="own sum"), "loss", "this rank's classes only"),
            WrongAnswer("own target", partial(sliced_loss, slip="own target"), "loss", "on one rank only"),
            WrongAnswer("own largest", partial(sliced_loss, slip="own largest"), "loss", "one number for all slices"),
            WrongAnswer("no largest", partial(sliced_loss, slip="no largest"), "large", "overflows"),
            WrongAnswer("no mask", partial(sliced_loss, slip="no mask"), "loss", "a mask must"),
        ),
    )
)  # fmt: skip


# --- the forgotten all-reduce ---

SHARED = {"norm.weight": (6,), "norm.bias": (6,), "down.bias": (6,)}
SLICED = {"up.weight": (4, 6), "up.bias": (4,), "down.weight": (6, 4)}


def gradients(rank: int, world_size: int) -> tuple[Any, ...]:
    """Gradients by name, as backward leaves them on a rank that saw its shard of the tokens."""
    shapes = list((SHARED | SLICED).items())
    return ({name: drawn(140 + 10 * place + rank, *shape) for place, (name, shape) in enumerate(shapes)},)


def drive_gradients(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    mine = {name: one.clone() for name, one in given.items()}
    function(mine)
    if set(mine) != set(given):
        raise Nonsense(", ".join(mine), _("the same names as before"))
    return mine


def shared_are_summed(outcome: Outcome) -> Finding:
    for name in SHARED:
        total = sum(outcome.inputs(rank)[0][name] for rank in range(outcome.world_size))
        for one in outcome.ranks:
            if not near(one.value[name], total):
                cause = _("it is used on other tokens on each rank, so that each has a part of its gradient")
                if near(one.value[name], total / outcome.world_size):
                    cause = _("the loss is a sum over tokens: parts of its gradient are added up, not averaged")
                elif name == "down.bias":
                    cause = _(
                        "the bias of the row-parallel layer is added to a shard of the tokens: it is like a norm's"
                    )
                told = _("rank {rank}: {name} has other numbers").format(rank=one.rank, name=name)
                return Finding(False, _("the sum over the ranks"), told, cause)
    return Finding(True)


def slices_are_kept(outcome: Outcome) -> Finding:
    for name in SLICED:
        for one in outcome.ranks:
            if not near(one.value[name], outcome.inputs(one.rank)[0][name]):
                told = _("rank {rank}: {name} was changed").format(rank=one.rank, name=name)
                cause = _("this is a slice: other ranks have other rows or columns, not other parts of its gradient")
                return Finding(False, _("{name} as it was").format(name=name), told, cause)
    return Finding(True)


def small_bytes(outcome: Outcome, rank: int) -> float:
    from labkit.collectives.formulas import all_reduce_sent

    return 3 * all_reduce_sent("ring", 6, ITEMSIZE, outcome.world_size).bytes[rank]


def repair(given: dict[str, Any], *, names: tuple[str, ...] = tuple(SHARED), average: bool = False) -> None:
    import torch.distributed as dist

    from labkit.collectives import all_reduce

    for name in names:
        all_reduce(given[name])
        if average:
            given[name] /= dist.get_world_size()


def sums_twice(given: dict[str, Any]) -> None:
    import torch.distributed as dist

    repair(given)
    repair(given, average=True)
    assert dist.is_initialized()


register(
    Exercise(
        id="norm-gradients",
        lesson="10",
        title=_("Find the missing all-reduce"),
        dots=2,
        minutes=8,
        answer="finish_gradients",
        hints=(
            _("Which of these parameters does every rank have whole, and yet use on its own tokens only?"),
            _("The norm works on shards of the sequence. What else is added to a shard?"),
            _("`all_reduce(gradients[name])` for norm.weight, norm.bias and down.bias."),
        ),
        properties=(
            Property("shared", _("what is whole on every rank has the whole gradient"), shared_are_summed),
            Property("slices", _("slices keep their own gradient"), slices_are_kept),
            bytes_sent(small_bytes, statement=_("no more is sent than these small gradients")),
        ),
        trials=tuple(
            Trial(_("{ranks} ranks").format(ranks=ranks), ranks, gradients, drive_gradients, ("gradients",))
            for ranks in (2, 3)
        ),
        wrong_answers=(
            WrongAnswer("nothing", partial(repair, names=()), "shared", "each has a part of its gradient"),
            WrongAnswer("only the norm", partial(repair, names=("norm.weight", "norm.bias")), "shared", "row-parallel"),
            WrongAnswer("an average", partial(repair, average=True), "shared", "not averaged"),
            WrongAnswer("everything", partial(repair, names=tuple(SHARED | SLICED)), "slices", "this is a slice"),
            WrongAnswer("twice", sums_twice, "bytes", "sent twice"),
        ),
    )
)
