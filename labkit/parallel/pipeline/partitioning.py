"""The partition problem: cut a row of costs into parts so that the most expensive part is as cheap as can be.

By dynamic programming: the best cut of the first n costs into p parts is the best over all places of the last cut.
Source: the linear partition problem, S. Skiena, The Algorithm Design Manual (2008), section 8.5; for pipelines D.
Narayanan and others, PipeDream, arXiv:1806.03377, section 3.2.
"""

from collections.abc import Sequence
from itertools import accumulate


def best_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Where each part after the first begins. No part is empty; among equally good cuts the most even one is taken."""
    if not 1 <= parts <= len(costs):
        raise ValueError(f"best_cuts: {len(costs)} costs can't be cut into {parts} parts, none of them empty")
    before = [0.0, *accumulate(costs)]
    # best[n]: (largest part, sum of squares, cuts) of the first n costs in the parts so far
    best = {n: (before[n], before[n] ** 2, list[int]()) for n in range(1, len(costs) + 1)}
    for part in range(2, parts + 1):
        longer = {}
        for n in range(part, len(costs) + 1):
            candidates = []
            for cut in range(part - 1, n):
                largest, squares, cuts = best[cut]
                last = before[n] - before[cut]
                candidates.append((max(largest, last), squares + last**2, [*cuts, cut]))
            longer[n] = min(candidates)
        best = longer
    return best[len(costs)][2]


def part_costs(costs: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """What each part costs."""
    ends = [*cuts, len(costs)]
    return [sum(costs[begin:end]) for begin, end in zip([0, *cuts], ends, strict=True)]
