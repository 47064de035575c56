"""Lesson 09: by what the loss of each micro-batch is multiplied, so that the gradient is the whole batch's."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.learn.answers import write_number
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

BATCHES = ([2, 2, 2], [2, 2, 2, 1], [5, 1, 3], [4], [0, 3, 1])


def weights(rank: int, world_size: int, *, tokens: list[int]) -> tuple[Any, ...]:
    return (list(tokens),)


def rows(tokens: list[int]) -> list[Any]:
    """For each micro-batch its tokens [n, 4]."""
    import torch

    random = torch.Generator().manual_seed(91)
    return [torch.randn(count, 4, generator=random) for count in tokens]


def own_mean(layer: Any, x: Any) -> Any:
    """The mean loss over a micro-batch's own tokens; 0 where it has none."""
    return layer(x).square().sum() / max(1, len(x))


def network() -> Any:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(91)
        return nn.Linear(4, 3)


def train(function: Callable[..., Any], tokens: list[int]) -> Any:
    """The factors, and the gradient when each micro-batch's mean is multiplied by its own."""
    found = function(list(tokens))
    wanted = _("a list of {count} numbers").format(count=len(tokens))
    if not isinstance(found, list | tuple) or len(found) != len(tokens):
        raise Nonsense(describe(found), wanted)
    if not all(isinstance(one, int | float) for one in found):
        raise Nonsense(describe(found), wanted)
    layer = network()
    for x, factor in zip(rows(tokens), found, strict=True):
        (own_mean(layer, x) * factor).backward()
    return layer.weight.grad


def is_whole(even: bool, outcome: Outcome) -> Finding:
    """The gradient is that of the mean over all tokens, in the trials with micro-batches of one length, or of more."""
    import torch

    (tokens,) = outcome.inputs(0)
    if (len(set(tokens)) == 1) is not even:
        return Finding(True)
    layer = network()
    own_mean(layer, torch.cat(rows(tokens))).backward()
    wanted, found = layer.weight.grad, outcome.values[0]
    if torch.allclose(found, wanted, rtol=1e-4, atol=1e-6):
        return Finding(True)
    told = [_("length {length}").format(length=write_number(float(one.norm()))) for one in (wanted, found)]
    return Finding(False, told[0], told[1], _cause(found, wanted, tokens))


def _cause(found: Any, wanted: Any, tokens: list[int]) -> str:
    import torch

    def gradient(factors: list[float]) -> Any:
        layer = network()
        for x, factor in zip(rows(tokens), factors, strict=True):
            (own_mean(layer, x) * factor).backward()
        return layer.weight.grad

    count, total = len(tokens), sum(tokens)
    slips = [
        (wanted * total, _("these are sums: divide by all tokens of the batch")),
        (wanted * total / count, _("divided by the number of micro-batches, and not by that of tokens")),
        (gradient([1.0] * count), _("the means add up: it grows with the number of micro-batches")),
        (gradient([1 / count] * count), _("a mean of means: tokens in a short micro-batch count for more")),
        (wanted / count, _("it is divided by the number of micro-batches once too often")),
        (gradient([1 / total] * count), _("each micro-batch counts alike, whatever its tokens")),
    ]
    return next((words for slip, words in slips if torch.allclose(found, slip, rtol=1e-4, atol=1e-6)), "")


# --- plausible wrong answers ---


def means_add_up(tokens: list[int]) -> list[float]:
    return [1.0] * len(tokens)


def mean_of_means(tokens: list[int]) -> list[float]:
    return [1 / len(tokens)] * len(tokens)


def sums(tokens: list[int]) -> list[float]:
    return [float(count) for count in tokens]


def over_the_micro_batches(tokens: list[int]) -> list[float]:
    return [count / len(tokens) for count in tokens]


def divided_twice(tokens: list[int]) -> list[float]:
    return [count / sum(tokens) / len(tokens) for count in tokens]


def one_token_each(tokens: list[int]) -> list[float]:
    return [1 / sum(tokens)] * len(tokens)


register(
    Exercise(
        id="uneven-loss",
        lesson="09",
        title=_("The loss of uneven micro-batches"),
        dots=1,
        minutes=6,
        answer="loss_factors",
        hints=(
            _("A micro-batch's mean times the number of its tokens is its sum. The sums may be added."),
            _("The mean over the whole batch is the sum over all tokens, divided by their number."),
            _("So: own tokens over all tokens. They add up to 1."),
        ),
        properties=(
            Property(
                "even", _("with micro-batches of equal length it is the batch's gradient"), partial(is_whole, True)
            ),
            Property("uneven", _("and with micro-batches of any length"), partial(is_whole, False)),
        ),
        trials=tuple(
            Trial(
                _("micro-batches of {tokens} tokens").format(tokens=", ".join(map(str, tokens))),
                1,
                partial(weights, tokens=tokens),
                train,
                ("tokens",),
            )
            for tokens in BATCHES
        ),
        wrong_answers=(
            WrongAnswer("the means add up", means_add_up, "even", "grows with the number of micro-batches"),
            WrongAnswer("a mean of means", mean_of_means, "uneven", "a mean of means"),
            WrongAnswer("sums", sums, "even", "these are sums"),
            WrongAnswer("over the micro-batches", over_the_micro_batches, "even", "not by that of tokens"),
            WrongAnswer("divided twice", divided_twice, "even", "once too often"),
            WrongAnswer("one token each", one_token_each, "even", "counts alike"),
        ),
    )
)
