"""Lesson 11: a sharded optimizer."""

from collections.abc import Callable
from typing import Any

from labkit.learn.catalog_values import drawn, rank_and_size
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import bytes_sent, equality
from labkit.words import _

STEPS, RATE, MOMENTUM = 2, 0.1, 0.9
LENGTH = 24  # elements; 1, 2, 3 and 4 ranks divide them


def steps_of_one(rank: int, world_size: int) -> tuple[Any, ...]:
    """Weights, the same on all ranks, and this rank's own gradients of two steps."""
    return drawn(1, LENGTH), [drawn(10 * step + rank + 2, LENGTH) for step in range(STEPS)]


def sharded_steps(function: Callable[..., Any], weights: Any, gradients: list[Any]) -> Any:
    """Drive the answer for two steps with momentum of this rank's part: weights and momentum end to end."""
    import torch

    _rank, size = rank_and_size()
    weights, momentum = weights.clone(), torch.zeros(LENGTH // size)
    for gradient in gradients:
        function(weights, gradient.clone(), momentum)
    if momentum.shape != (LENGTH // size,):
        raise Nonsense(describe(momentum), _("momentum of the shape that was given, changed in place"))
    return torch.cat([weights, momentum])


def _stepped(
    outcome: Outcome, divisor: float | None = None, *, own: bool = False, fresh: float = 1.0, plain: bool = False
) -> list[Any]:
    """What each rank should have; or with its `own` gradients only, with `fresh` times the gradient in the momentum,
    or with weights that lose the `plain` gradient."""
    import torch

    size = outcome.world_size
    weights, momentum = outcome.inputs(0)[0].clone(), torch.zeros(LENGTH)
    for step in range(STEPS):
        gradients = [outcome.inputs(rank)[1][step] for rank in range(size)]
        mean = sum(gradients) / (size if divisor is None else divisor)
        if own:
            n = LENGTH // size
            mean = torch.cat([gradients[rank][rank * n : (rank + 1) * n] for rank in range(size)])
        momentum = MOMENTUM * momentum + fresh * mean
        weights = weights - RATE * (mean if plain else momentum)
    return [torch.cat([weights, part]) for part in momentum.split(LENGTH // size)]


def _step_cause(outcome: Outcome, rank: int) -> str:
    import torch

    found, size = outcome.ranks[rank].value, outcome.world_size
    begin = outcome.inputs(0)[0]
    part = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    if size > 1 and torch.allclose(found, _stepped(outcome, 1)[rank], atol=1e-5):
        return _("the gradients are summed: divide by the number of ranks")
    if size > 1 and torch.allclose(found, _stepped(outcome, own=True)[rank], atol=1e-5):
        return _("each rank has used its own gradient only: the mean is over all ranks")
    if torch.allclose(found, _stepped(outcome, fresh=1 - MOMENTUM)[rank], atol=1e-5):
        return _("the momentum takes the whole gradient, not a tenth of it")
    if torch.allclose(found, _stepped(outcome, plain=True)[rank], atol=1e-5):
        return _("the weights lose 0.1 times the momentum, not the gradient")
    if torch.allclose(found[:LENGTH], begin):
        return _("the weights are as they were: step this rank's part of them, in place")
    rest = torch.ones(LENGTH, dtype=torch.bool)
    rest[part] = False
    if size > 1 and torch.equal(found[:LENGTH][rest], begin[rest]):
        return _("only this rank's part has been stepped: the others' parts have to be gathered")
    if not found[LENGTH:].any():
        return _("the momentum is zero still: change it in place, it is needed in the next step")
    return ""


def _all_gather_and_reduce(outcome: Outcome, rank: int) -> float:
    size = outcome.world_size
    return STEPS * 2 * 4 * LENGTH * (size - 1) / size


def _step_bytes_cause(outcome: Outcome, rank: int) -> str:
    size = outcome.world_size
    sent = outcome.ranks[rank].record.bytes_sent
    if sent == STEPS * 3 * 4 * LENGTH * (size - 1) / size:
        return _("an all-reduce is a reduce-scatter and an all-gather: its second half is not needed here")
    return ""


def _update(weights: Any, gradient: Any, momentum: Any, rank: int) -> None:
    momentum.mul_(MOMENTUM).add_(gradient)
    part = weights[rank * len(momentum) : (rank + 1) * len(momentum)]
    part.sub_(RATE * momentum)


def _gather(weights: Any, momentum: Any, rank: int) -> None:
    from labkit import collectives

    part = weights[rank * len(momentum) : (rank + 1) * len(momentum)]
    collectives.all_gather_into_tensor(weights, part.clone())


def all_reduces(weights: Any, gradient: Any, momentum: Any) -> None:
    """Right, and half as many bytes again: what plain data parallel with a sharded optimizer does."""
    from labkit import collectives

    rank, size = rank_and_size()
    collectives.all_reduce(gradient)
    own = gradient.view(size, -1)[rank] / size
    _update(weights, own, momentum, rank)
    _gather(weights, momentum, rank)


def sums(weights: Any, gradient: Any, momentum: Any) -> None:
    import torch

    from labkit import collectives

    rank, _size = rank_and_size()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient)
    _update(weights, own, momentum, rank)
    _gather(weights, momentum, rank)


def forgets_to_gather(weights: Any, gradient: Any, momentum: Any) -> None:
    import torch

    from labkit import collectives

    rank, size = rank_and_size()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient / size)
    _update(weights, own, momentum, rank)


def uses_its_own_gradient(weights: Any, gradient: Any, momentum: Any) -> None:
    rank, size = rank_and_size()
    _update(weights, gradient.view(size, -1)[rank], momentum, rank)
    _gather(weights, momentum, rank)


def averages_over_time(weights: Any, gradient: Any, momentum: Any) -> None:
    """A moving average, as Adam's first moment is."""
    import torch

    from labkit import collectives

    rank, size = rank_and_size()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient / size)
    _update(weights, (1 - MOMENTUM) * own, momentum, rank)
    _gather(weights, momentum, rank)


def steps_by_the_gradient(weights: Any, gradient: Any, momentum: Any) -> None:
    import torch

    from labkit import collectives

    rank, size = rank_and_size()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient / size)
    momentum.mul_(MOMENTUM).add_(own)
    weights[rank * len(momentum) : (rank + 1) * len(momentum)].sub_(RATE * own)
    _gather(weights, momentum, rank)


def momentum_of_its_own(weights: Any, gradient: Any, momentum: Any) -> None:
    """The argument is bound anew, and the caller's stays zero."""
    import torch

    from labkit import collectives

    rank, size = rank_and_size()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient / size)
    _update(weights, own, momentum.clone(), rank)
    _gather(weights, momentum, rank)


register(
    Exercise(
        id="sharded-step",
        lesson="11",
        title=_("Shard an optimizer"),
        dots=2,
        minutes=12,
        answer="sharded_step",
        hints=(
            _("Three calls: reduce-scatter the gradient, step this rank's part, gather the parts."),
            _("`collectives.reduce_scatter_tensor(own, gradient)` sums part r of all ranks into rank r's `own`. A mean "
              "is wanted."),
            _("This rank's part of the weights is `weights[rank * n : (rank + 1) * n]`, n = len(momentum); a view, so "
              "`sub_` changes the weights. Then `collectives.all_gather_into_tensor(weights, part)`."),
        ),
        properties=(
            equality(
                lambda outcome: _stepped(outcome),
                statement=_("weights and momentum are those of SGD with the mean gradient"),
                cause=_step_cause,
            ),
            bytes_sent(
                _all_gather_and_reduce,
                statement=_("a step sends 2 K (N - 1) / N elements of K"),
                cause=_step_bytes_cause,
            ),
        ),
        trials=tuple(
            Trial(_("2 steps on {ranks} ranks").format(ranks=ranks), ranks, steps_of_one, sharded_steps)
            for ranks in (1, 2, 3)
        ),
        wrong_answers=(
            WrongAnswer("all-reduces the gradient", all_reduces, "bytes", "second half is not needed"),
            WrongAnswer("sums the gradients", sums, "equality", "divide by the number of ranks"),
            WrongAnswer("forgets to gather", forgets_to_gather, "equality", "have to be gathered"),
            WrongAnswer("keeps a momentum of its own", momentum_of_its_own, "equality", "change it in place"),
            WrongAnswer("uses its own gradient", uses_its_own_gradient, "equality", "its own gradient only"),
            WrongAnswer("averages over time", averages_over_time, "equality", "not a tenth"),
            WrongAnswer("steps by the gradient", steps_by_the_gradient, "equality", "not the gradient"),
        ),
    )
)  # fmt: skip
