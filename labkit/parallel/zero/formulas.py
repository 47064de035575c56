"""What each stage of ZeRO holds and sends, by formula: to be held against what ledger and recorder count.

Source: S. Rajbhandari and others, ZeRO (SC20), arXiv:1910.02054, table 1, sections 5 and 7. P parameters, N ranks; with
Adam in mixed precision a parameter takes 2 bytes for its value, 2 for its gradient and K = 12 for the optimizer: a
float32 copy and two moments. In float32 they are 4, 4 and 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes that a parameter takes where it is held whole."""

    value: int
    gradient: int
    optimizer: int


MIXED = BytesPerParameter(2, 2, 12)
FLOAT32 = BytesPerParameter(4, 4, 8)


def state_per_rank(stage: int, elements: float, ranks: int, each: BytesPerParameter = MIXED) -> dict[str, float]:
    """Bytes of "parameters", "gradients" and "optimizer_state" on each rank, between backward and step.

    Stage 0 is data parallel. In mixed precision their sums are 16 P, 4 P + 12 P / N, 2 P + 14 P / N and 16 P / N.
    `elements` is P, padding included where it should be. Raises ValueError for another stage.
    """
    if stage not in STAGES:
        raise ValueError(f"stage is {stage!r}; give 0, 1, 2 or 3")
    return {
        "parameters": each.value * elements / (ranks if stage >= 3 else 1),
        "gradients": each.gradient * elements / (ranks if stage >= 2 else 1),
        "optimizer_state": each.optimizer * elements / (ranks if stage >= 1 else 1),
    }


def sent_per_step(stage: int, elements: float, ranks: int, *, reshard_after_forward: bool = True) -> float:
    """Elements that each rank sends in a step: 2 P (N - 1) / N, in stage 3 three times P (N - 1) / N.

    Stages 0 to 2 reduce-scatter gradients and gather stepped parameters (an all-reduce is both, of gradients). Stage 3
    gathers in forward, once more in backward unless the parameters were kept, and reduce-scatters. `elements` is P,
    padded to a multiple of N for each bucket or unit.
    """
    times = 3 if stage == 3 and reshard_after_forward else 2
    return times * elements * (ranks - 1) / ranks


def peak_of_step(
    units: Sequence[int], ranks: int, each: BytesPerParameter = FLOAT32, *, prefetch: bool = True
) -> float:
    """Bytes that stage 3 holds at the peak of a step, activations apart, from its second step on.

    `units` are the elements of the units in the order of forward, padding included. Shards of all are there all the
    time, those of gradients from when their unit was reduced. While backward computes a unit, it is gathered, with
    `prefetch` the one that backward comes to next as well; its whole gradients are there, and those of the unit before,
    whose reduction is under way.
    """
    highest = 0.0
    for place, unit in enumerate(units):  # backward comes from the end
        following = units[place - 1] if prefetch and place else 0
        under_way = units[place + 1] if place + 1 < len(units) else 0
        reduced = sum(units[place + 1 :]) / ranks
        highest = max(highest, each.value * (unit + following) + each.gradient * (unit + under_way + reduced))
    return (each.value + each.optimizer) * sum(units) / ranks + highest
