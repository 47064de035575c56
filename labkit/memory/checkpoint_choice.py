"""The checkpoints for a budget of memory that cost the least time, by dynamic programming.

From the first block to the last: of all ways to treat the blocks so far, only those are kept that no other beats in
both, the bytes held and the seconds to recompute. A way that ever needs more than the budget is dropped. Blocks are
held as ever, or form checkpoints of any length; so the best of all is found, not of some.

Source of the idea, there with a budget for each piece: T. Chen and others, Training Deep Nets with Sublinear Memory
Cost (2016), arXiv:1604.06174, section 4.2 and appendix A; optimal for chains: O. Beaumont and others, Optimal
Checkpointing for Heterogeneous Chains (2019), arXiv:1911.13214.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from labkit.memory.accounts import MemoryBudgetError
from labkit.memory.checkpoint_formulas import BlockCost, checkpointed_peak, recomputed_bytes, stored_bytes


class _Way(NamedTuple):
    held: int
    seconds: float
    groups: tuple[range, ...]


def best_groups(
    blocks: Sequence[BlockCost], budget_bytes: float, *, before: int = 0, after: int = 0, input_held: bool = False
) -> list[range]:
    """The groups of blocks to be checkpoints, for `checkpoint_blocks`: the activations' peak is within `budget_bytes`
    and no choice that keeps to it has less to recompute.

    Arguments as of `checkpointed_peak`; `measure_blocks` measures them. Gradients, weights and their state are not in
    the budget. MemoryBudgetError if no choice keeps to it, with the least that one needs.
    """
    ways = _fronts(blocks, budget_bytes, before, input_held)
    ended = [way for way in ways if way.held + after <= budget_bytes]
    if not ended:
        least = least_peak(blocks, before=before, after=after, input_held=input_held)
        raise MemoryBudgetError(
            f"These {len(blocks)} blocks need {least / 1e6:.4g} MB of activations at least, however they are "
            f"checkpointed, and the budget is {budget_bytes / 1e6:.4g} MB: make the batch smaller or shorter."
        )
    return list(min(ended, key=lambda way: (way.seconds, way.held)).groups)


def least_peak(blocks: Sequence[BlockCost], *, before: int = 0, after: int = 0, input_held: bool = False) -> int:
    """The least peak that checkpoints can reach, in bytes, found by halving the interval."""
    low, high = 0, checkpointed_peak(blocks, [], before=before, after=after, input_held=input_held)
    while low < high:
        middle = (low + high) // 2
        if any(way.held + after <= middle for way in _fronts(blocks, middle, before, input_held)):
            high = middle
        else:
            low = middle + 1
    return low


def _fronts(blocks: Sequence[BlockCost], budget: float, before: int, input_held: bool) -> Iterable[_Way]:
    """The ways to treat all blocks that are within the budget at every moment but the last."""
    count = len(blocks)
    # by place and by whether the input of the block there is held already
    ways: list[tuple[list[_Way], list[_Way]]] = [([], []) for _ in range(count + 1)]
    if before <= budget:
        ways[0][input_held].append(_Way(before, 0.0, ()))
    inside = [[recomputed_bytes(blocks, range(i, j)) for j in range(i + 1, count + 1)] for i in range(count)]
    for place in range(count):
        for there in (False, True):
            for way in _best(ways[place][there]):
                held = way.held + stored_bytes(blocks[place], there)
                if held <= budget:
                    ways[place + 1][bool(blocks[place].output)].append(_Way(held, way.seconds, way.groups))
                border, kept, seconds = 0 if there else blocks[place].border, 0, way.seconds
                for stop in range(place + 1, count + 1):
                    kept, seconds = kept + blocks[stop - 1].kept, seconds + blocks[stop - 1].seconds
                    if way.held + border + inside[place][stop - place - 1] > budget:
                        break
                    groups = (*way.groups, range(place, stop))
                    ways[stop][False].append(_Way(way.held + border + kept, seconds, groups))
    return _best(ways[count][False] + ways[count][True])


def _best(ways: list[_Way]) -> list[_Way]:
    """Those that no other beats in both, bytes and seconds."""
    found: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.held, way.seconds)):
        if not found or way.seconds < found[-1].seconds - 1e-12:
            found.append(way)
    return found
