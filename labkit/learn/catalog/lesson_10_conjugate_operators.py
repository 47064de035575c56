"""Lesson 10: where the two conjugate operators go."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.learn.catalog.lesson_10 import BATCH, INNER, WIDTH, near, one_all_reduce, part
from labkit.learn.catalog_values import drawn
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent
from labkit.words import _


def mlp_inputs(rank: int, world_size: int) -> tuple[Any, ...]:
    """x [B, d], this rank's up [inner / N, d] and down [d, inner / N]."""
    up, down = part(drawn(106, INNER, WIDTH), 0, rank, world_size), part(drawn(107, WIDTH, INNER), 1, rank, world_size)
    return drawn(105, BATCH, WIDTH), up, down


def drive_mlp(function: Callable[..., Any], *inputs: Any) -> Any:
    """Output, and gradients of x, up and down."""
    import torch

    x, up, down = (one.clone().requires_grad_() for one in inputs)
    output = function(x, up, down)
    if not isinstance(output, torch.Tensor) or output.shape != x.shape:
        raise Nonsense(describe(output), _("a tensor of shape {shape}").format(shape=tuple(x.shape)))
    if not output.requires_grad:
        raise Nonsense(_("a tensor without a gradient"), _("a tensor that autograd can go back from"))
    output.backward(drawn(108, BATCH, WIDTH))
    return [output.detach(), *(torch.zeros_like(one) if one.grad is None else one.grad for one in (x, up, down))]


def mlp_truth(rank: int, world_size: int) -> list[Any]:
    import torch.nn.functional as F

    x, up, down = (
        one.requires_grad_() for one in (drawn(105, BATCH, WIDTH), drawn(106, INNER, WIDTH), drawn(107, WIDTH, INNER))
    )
    output = F.gelu(x @ up.T) @ down.T
    output.backward(drawn(108, BATCH, WIDTH))
    return [output.detach(), x.grad, part(up.grad, 0, rank, world_size), part(down.grad, 1, rank, world_size)]


def mlp_is_right(which: slice, outcome: Outcome) -> Finding:
    names = ("the output", "the gradient of x", "the gradient of up", "the gradient of down")
    causes = (
        _("every rank has partial sums at the end: they must be added up there, and not before"),
        _("every rank has a part of the gradient at the start: they must be added up there"),
        _("its gradient is one rank's part, or counts several times: which operator stands behind it?"),
        _("its gradient is one rank's part, or counts several times: which operator stands behind it?"),
    )
    for one in outcome.ranks:
        truth = mlp_truth(one.rank, outcome.world_size)
        for name, found, wanted, cause in list(zip(names, one.value, truth, causes, strict=True))[which]:
            if not near(found, wanted):
                if near(found, wanted * outcome.world_size):
                    cause = _("it is {n} times too large: an operator too many, or one that sums both ways").format(
                        n=outcome.world_size
                    )
                told = _("rank {rank}: {name} has other numbers").format(rank=one.rank, name=name)
                return Finding(False, _("the numbers of one process"), told, cause)
    return Finding(True)


def two_all_reduces(outcome: Outcome, rank: int) -> float:
    return 2 * one_all_reduce(BATCH * WIDTH, outcome, rank)


def placed(x: Any, up: Any, down: Any, *, slip: str = "") -> Any:
    import torch.nn.functional as F

    from labkit.parallel.tensor import copy_in, gather_out, reduce_out

    if slip == "swapped":
        return copy_in(F.gelu(reduce_out(x) @ up.T) @ down.T)
    if slip == "twice":
        return reduce_out(copy_in(F.gelu(copy_in(x) @ up.T)) @ down.T)
    if slip == "gathers":
        hidden = gather_out(F.gelu(copy_in(x) @ up.T), -1)
        columns = gather_out(down, -1)
        return hidden @ columns.T
    if slip == "nothing":
        return F.gelu(x @ up.T) @ down.T
    if slip == "only the end":
        return reduce_out(F.gelu(x @ up.T) @ down.T)
    if slip == "only the start":
        return F.gelu(copy_in(x) @ up.T) @ down.T
    return reduce_out(F.gelu(copy_in(x) @ up.T) @ down.T)


register(
    Exercise(
        id="conjugate-operators",
        lesson="10",
        title=_("Place the two conjugate operators"),
        dots=1,
        minutes=8,
        answer="shared_mlp",
        hints=(
            _("Where do ranks have partial sums in forward? There they must be added up."),
            _(
                "In backward each rank has a part of the gradient of x. `copy_in` adds these up; forward it does "
                "nothing."
            ),
            _("`copy_in` around x, before the first product; `reduce_out` around the second product."),
        ),
        properties=(
            Property("output", _("the output is that of one process"), partial(mlp_is_right, slice(0, 1))),
            Property("gradients", _("and so are the gradients"), partial(mlp_is_right, slice(1, 4))),
            bytes_sent(two_all_reduces, statement=_("one all-reduce forward and one backward are sent")),
        ),
        trials=tuple(
            Trial(_("{ranks} ranks").format(ranks=ranks), ranks, mlp_inputs, drive_mlp, ("x", "up", "down"))
            for ranks in (2, 4)
        ),
        wrong_answers=(
            WrongAnswer("nothing", partial(placed, slip="nothing"), "output", "partial sums at the end"),
            WrongAnswer("only the start", partial(placed, slip="only the start"), "output", "partial sums at the end"),
            WrongAnswer("only the end", partial(placed, slip="only the end"), "gradients", "added up there"),
            WrongAnswer("swapped", partial(placed, slip="swapped"), "output", "partial sums at the end"),
            WrongAnswer("one in the middle too", partial(placed, slip="twice"), "gradients", "at the start"),
            WrongAnswer("gathers the middle", partial(placed, slip="gathers"), "bytes", "what is needed"),
        ),
    )
)
