"""Lesson 03: where the tree and the ring take the same time."""

import math
from collections.abc import Callable
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

CASES = tuple(
    (alpha, beta, size) for size in (4, 8, 64) for alpha, beta in ((50e-6, 8e-9), (5e-6, 8e-11), (1e-3, 1e-8))
)


def all_crossovers(function: Callable[..., Any]) -> list[float]:
    """The answer's sizes in bytes for all cases."""
    found = []
    for alpha, beta, size in CASES:
        value = function(alpha, beta, size)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Nonsense(describe(value), _("a number of bytes"))
        found.append(float(value))
    return found


def _ring_seconds(n: float, alpha: float, beta: float, size: int) -> float:
    return 2 * (size - 1) * (alpha + n / size * beta)


def _tree_seconds(n: float, alpha: float, beta: float, size: int) -> float:
    return 2 * math.log2(size) * (alpha + n * beta)


def _same_time(outcome: Outcome) -> Finding:
    for (alpha, beta, size), n in zip(CASES, outcome.values[0], strict=True):
        ring, tree = _ring_seconds(n, alpha, beta, size), _tree_seconds(n, alpha, beta, size)
        if not (n > 0 and math.isclose(ring, tree, rel_tol=1e-6)):
            wanted = _("a size at which both take the same time")
            text = _("{n:.4g} bytes on {size} ranks: ring {ring:.3g} s, tree {tree:.3g} s")
            return Finding(
                False, wanted, text.format(n=n, size=size, ring=ring, tree=tree), _crossing(n, alpha, beta, size)
            )
    return Finding(True)


def _crossing(n: float, alpha: float, beta: float, size: int) -> str:
    rounds = math.log2(size)
    right = alpha * (size - 1 - rounds) / (beta * (rounds - (size - 1) / size))
    if n <= 0:
        return _("a size below zero: which of the two has more messages, and which more bytes?")
    if math.isclose(n, 8 * right, rel_tol=1e-6) or math.isclose(n, right / 8, rel_tol=1e-6):
        return _("off by 8: beta is seconds a byte here, not a bit")
    if math.isclose(
        n, alpha * (size - 1 - math.log(size)) / (beta * (math.log(size) - (size - 1) / size)), rel_tol=1e-6
    ):
        return _("the tree has log2 N rounds each way: log to base 2")
    if math.isclose(n, alpha / beta, rel_tol=1e-6):
        return _(
            "that is where latency and bandwidth cost the same in one message; write down both times and equate them"
        )
    if n > right:
        return _("the ring sends 1 / N of the tensor in a step, the tree all of it: is one of them too cheap?")
    return ""


def latency_equals_bandwidth(alpha: float, beta: float, size: int) -> float:
    return alpha / beta


def natural_logarithm(alpha: float, beta: float, size: int) -> float:
    return alpha * (size - 1 - math.log(size)) / (beta * (math.log(size) - (size - 1) / size))


def counts_bits(alpha: float, beta: float, size: int) -> float:
    rounds = math.log2(size)
    return 8 * alpha * (size - 1 - rounds) / (beta * (rounds - (size - 1) / size))


def ring_sends_whole_tensors(alpha: float, beta: float, size: int) -> float:
    rounds = math.log2(size)
    return alpha * (size - 1 - rounds) / (beta * (rounds - (size - 1)))


register(
    Exercise(
        id="crossover",
        lesson="03",
        title=_("Where the ring overtakes the tree"),
        dots=2,
        minutes=10,
        answer="crossover",
        hints=(
            _("Write down both times. A message of m bytes takes alpha + m beta."),
            _("Ring: 2 (N - 1) messages of n / N bytes, one after the other. Tree: log2 N messages up and as many "
              "down, of n bytes each."),
            _("Set the two equal and solve for n: alpha (N - 1 - log2 N) = n beta (log2 N - (N - 1) / N)."),
        ),
        properties=(
            Property("same time", _("at this size the tree and the ring take the same time"), _same_time),
        ),
        trials=(Trial(_("4, 8 and 64 ranks on three networks"), drive=all_crossovers),),
        wrong_answers=(
            WrongAnswer("latency equals bandwidth", latency_equals_bandwidth, "same time", "in one message"),
            WrongAnswer("natural logarithm", natural_logarithm, "same time", "base 2"),
            WrongAnswer("bits for bytes", counts_bits, "same time", "off by 8"),
            WrongAnswer("the ring sends whole tensors", ring_sends_whole_tensors, "same time", "below zero"),
        ),
    )
)  # fmt: skip
