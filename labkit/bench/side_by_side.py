"""Side by side: two ways to do the same, timed turn about in the same ranks, with a control.

One launch, A B C C B A in a round, B C A A C B in the next: A is ours, B theirs, C theirs once more. What drifts on the
machine meanwhile drifts for all, and each is as often its own predecessor, which leaves it a warm cache. C against B,
which are equal, shows how far two equals differ here.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from labkit.collectives import barrier
from labkit.collectives.groups import Group

WARM_UPS = 5
STEPS = 30

Action = Callable[[], object]


def take_turns(
    actions: Sequence[Action], *, steps: int = STEPS, warm_ups: int = WARM_UPS, group: Group = None
) -> list[list[float]]:
    """Seconds of each step of each action on this rank; every rank of the group calls it with the same actions.

    In each round every action has two steps, the second in reverse order, and the next round begins with another; all
    ranks start each step together. Outside of ranks there is nobody to start with.
    """
    seconds: list[list[float]] = [[] for _ in actions]
    order, warming, rounds = list(range(len(actions))), -(-warm_ups // 2), -(-steps // 2)
    for turn in range(warming + rounds):
        if turn == warming:
            seconds = [[] for _ in actions]
        order = order[1:] + order[:1]
        for number in [*order, *reversed(order)]:
            if dist.is_initialized():
                barrier(group)
            begin = time.perf_counter()
            actions[number]()
            seconds[number].append(time.perf_counter() - begin)
    return seconds


@dataclass(frozen=True)
class Ratio:
    """How many times as long one takes as the other: the median over rounds, and its quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        """From the seconds of steps, of which two in a row are a round."""
        pairs = zip(_rounds(numerators), _rounds(denominators), strict=True)
        ratios = [one / other for one, other in pairs]
        low, middle, high = statistics.quantiles(ratios if len(ratios) > 1 else ratios * 2, n=4)
        return Ratio(middle, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} (quartiles {self.low:.3f} to {self.high:.3f})"


def _rounds(seconds: Sequence[float]) -> list[float]:
    return [one + other for one, other in zip(seconds[::2], seconds[1::2], strict=True)]


@dataclass(frozen=True)
class Comparison:
    """Ours beside theirs: seconds of each step, each the maximum over the ranks, in the order of the rounds."""

    ours: list[float]
    theirs: list[float]
    control: list[float]

    @staticmethod
    def of(per_rank: Sequence[Sequence[Sequence[float]]]) -> "Comparison":
        """From what `take_turns([ours, theirs, theirs again])` returned on each rank."""
        return Comparison(*slowest(per_rank))

    @property
    def ratio(self) -> Ratio:
        """Ours over theirs."""
        return Ratio.of(self.ours, self.theirs)

    @property
    def noise(self) -> Ratio:
        """Theirs over theirs: the A/A control."""
        return Ratio.of(self.control, self.theirs)

    def line(self, name: str, *, target: float | None = None, of_whom: str = "PyTorch's") -> str:
        """One line for the log: both medians in ms, the ratio with its spread, the control, the target."""
        ratio = self.ratio
        verdict = ""
        if target is not None:
            verdict = f", {'within' if ratio.median <= target else 'over'} the target of {target:g}"
        return (
            f"{name}: {1e3 * statistics.median(self.ours):.2f} ms, {of_whom} "
            f"{1e3 * statistics.median(self.theirs):.2f} ms; ratio {ratio}{verdict}; two of {of_whom} {self.noise}"
        )


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Between which two half of the steps lie, for the spread of a bar."""
    low, _, high = statistics.quantiles(seconds if len(seconds) > 1 else [*seconds] * 2, n=4)
    return low, high


def slowest(per_rank: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """For each action the seconds of each step, the maximum over the ranks."""
    return [[max(times) for times in zip(*action, strict=True)] for action in zip(*per_rank, strict=True)]
