"""Lesson 09: a schedule of one's own, under a budget, run on real ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.learn.catalog.lesson_09_schedules import (
    LEGAL,
    Rows,
    has_bubble,
    keeps_at_most,
    like_1f1b,
    like_gpipe,
    one_at_a_time,
    read,
    trials_of,
)
from labkit.learn.catalog_values import drawn
from labkit.learn.exercises import Exercise, WrongAnswer, register
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

RACES = ((2, 4), (3, 6), (4, 8))


def stages(count: int) -> list[Any]:
    """The same small stages on every rank."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(count)]


def batch(micro_batches: int) -> Any:
    """Rows [2 M - 1, 5]: one micro-batch has one row less than the others."""
    return drawn(90, 2 * micro_batches - 1, 5)


def loss(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def write_and_run(function: Callable[..., Any], ranks: int, micro_batches: int) -> Any:
    """The schedule, and this rank's gradient after a step of it on real ranks; None where it can't run."""
    import torch
    import torch.distributed as dist

    from labkit.parallel.pipeline import PipelineSchedule, PipelineStage, schedule_faults

    made = read(function(ranks, micro_batches), ranks)
    if schedule_faults(made, ranks=ranks, stages=ranks, micro_batches=micro_batches):
        return made, None
    stage = PipelineStage(stages(ranks)[dist.get_rank()], dist.get_rank(), ranks, "cpu")
    x = batch(micro_batches)
    PipelineSchedule(stage, made, loss_fn=loss).step(x, target=x)
    gradients: list[Any] = [parameter.grad for parameter in stage.submodule.parameters()]
    return made, torch.cat([gradient.flatten() for gradient in gradients])


def right_gradient(outcome: Outcome) -> Finding:
    """Each rank's gradient is one process's."""
    import torch

    ranks, micro_batches = outcome.inputs(0)
    modules, x = stages(ranks), batch(micro_batches)
    value = x
    for module in modules:
        value = module(value)
    loss(value, x).backward()
    for rank, (_schedule, found) in enumerate(outcome.values):
        if found is None:
            return Finding(False, _("the gradient of one process"), _("it can't run"))
        wanted = torch.cat([parameter.grad.flatten() for parameter in modules[rank].parameters()])
        if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-6):
            told = _("rank {rank}: length {length:.4g}").format(rank=rank, length=float(found.norm()))
            return Finding(False, _("length {length:.4g}").format(length=float(wanted.norm())), told)
    return Finding(True)


def w_at_once(ranks: int, micro_batches: int) -> Rows:
    rows = [row.split() for row in like_1f1b(ranks, micro_batches)]
    split = [
        [one.replace("B", "I") + (f" {one.replace('B', 'W')}" if "B" in one else "") for one in row] for row in rows
    ]
    return [" ".join(row) for row in split]


def w_at_the_end(ranks: int, micro_batches: int) -> Rows:
    rows = [row.replace("B", "I") for row in like_1f1b(ranks, micro_batches)]
    return [f"{row} {' '.join(f'W{number}' for number in range(micro_batches))}" for row in rows]


def forgets_i(ranks: int, micro_batches: int) -> Rows:
    return [row.replace("B", "W") for row in like_1f1b(ranks, micro_batches)]


def forgets_w(ranks: int, micro_batches: int) -> Rows:
    return [row.replace("B", "I") for row in like_1f1b(ranks, micro_batches)]


register(
    Exercise(
        id="race",
        lesson="09",
        title=_("The race: your own schedule"),
        dots=3,
        minutes=25,
        answer="my_rows",
        hints=(
            _("In 1F1B rank r waits for r ranks to fill the pipeline, and for r to empty it. What could it do in "
              "this time that nobody waits for?"),
            _("Write I for the part of a backward that the rank before waits for, and W for the rest. Keep 1F1B's "
              "order of F and I. Rank K - 1 keeps one micro-batch alive in 1F1B and may keep K: it may put W off."),
            _("Let rank r be r micro-batches behind with W: after I of micro-batch m comes W of m - r, then the next "
              "F. What is left of W comes at the end."),
        ),
        properties=(
            LEGAL,
            Property(
                "activations",
                _("no rank keeps more than K micro-batches alive, the most that 1F1B keeps"),
                partial(keeps_at_most, lambda rank, ranks, micro_batches: ranks),
            ),
            Property("bubble", _("the bubble is at most half of 1F1B's"), partial(has_bubble, 0.5)),
            Property("gradients", _("on real ranks every gradient is that of one process"), right_gradient),
        ),
        trials=trials_of(RACES, write_and_run, real=True),
        wrong_answers=(
            WrongAnswer("GPipe", like_gpipe, "activations", "that is GPipe"),
            WrongAnswer("1F1B", like_1f1b, "bubble", "that is the bubble of GPipe and 1F1B"),
            WrongAnswer("one at a time", one_at_a_time, "bubble", "one rank works at a time"),
            WrongAnswer("W at once", w_at_once, "bubble", "W right behind its I fills no bubble"),
            WrongAnswer("W at the end", w_at_the_end, "activations", "put off for too long"),
            WrongAnswer("forgets I", forgets_i, "legal", "W is what I has left over"),
            WrongAnswer("forgets W", forgets_w, "legal", "an action is missing"),
        ),
    )
)  # fmt: skip
