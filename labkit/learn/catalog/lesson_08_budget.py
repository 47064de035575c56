"""Lesson 08: which blocks to checkpoint, so that a budget is kept and the least is computed again."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.memory.checkpoint_formulas import BlockCost, checkpointed_peak
from labkit.words import _

MB = 10**6
Choice = Callable[..., Any]


def block(border: int, inside: int, milliseconds: float) -> BlockCost:
    return BlockCost(border * MB, inside * MB, seconds=milliseconds / 1e3)


#: Blocks that are all alike, that shrink as in a residual network, and some of which cost much time for little memory.
_SHRINKING = ((8, 40, 5), (8, 40, 5), (4, 20, 5), (4, 20, 5), (2, 10, 5), (2, 10, 5))
_UNEQUAL = ((2, 30, 20), (2, 24, 3), (2, 22, 3), (2, 30, 30), (2, 20, 4), (2, 10, 1))
STACKS: dict[str, tuple[tuple[BlockCost, ...], int]] = {
    "alike": ((block(1, 15, 4),) * 8, 64 * MB),
    "shrinking": (tuple(block(*sizes) for sizes in _SHRINKING), 100 * MB),
    "unequal": (tuple(block(*sizes) for sizes in _UNEQUAL), 100 * MB),
    "enough": ((block(1, 10, 2),) * 4, 50 * MB),
}


def peak_of(blocks: Sequence[BlockCost], chosen: Sequence[int]) -> int:
    """Each chosen block is one checkpoint."""
    return checkpointed_peak(blocks, [range(number, number + 1) for number in chosen])


def seconds_of(blocks: Sequence[BlockCost], chosen: Iterable[int]) -> float:
    return sum(blocks[number].seconds for number in chosen)


def given(rank: int, world_size: int, *, name: str) -> tuple[Any, ...]:
    blocks, budget = STACKS[name]
    return list(blocks), budget


def drive(choose_blocks: Choice, blocks: list[BlockCost], budget: int) -> dict[str, Any]:
    """What was chosen; its peak and time, and the least time that any choice needs."""
    found = choose_blocks(list(blocks), budget)
    wanted = _("the numbers of the blocks to checkpoint, a list of whole numbers from 0 to {n}")
    try:
        chosen = sorted({int(number) for number in found})
    except (TypeError, ValueError):
        raise Nonsense(describe(found), wanted.format(n=len(blocks) - 1)) from None
    if any(not 0 <= number < len(blocks) for number in chosen):
        raise Nonsense(describe(found), wanted.format(n=len(blocks) - 1))
    choices = itertools.chain.from_iterable(
        itertools.combinations(range(len(blocks)), count) for count in range(len(blocks) + 1)
    )
    least = min(seconds_of(blocks, each) for each in choices if peak_of(blocks, each) <= budget)
    held = sum(blocks[n].border if n in chosen else blocks[n].border + blocks[n].inside for n in range(len(blocks)))
    return {"peak": peak_of(blocks, chosen), "held": held, "seconds": seconds_of(blocks, chosen), "least": least,
            "budget": budget, "all": len(chosen) == len(blocks)}  # fmt: skip


def fits(outcome: Outcome) -> Finding:
    seen = outcome.values[0]
    if seen["peak"] <= seen["budget"]:
        return Finding(True)
    cause = _("what is held at the end of forward is too much: choose more, or larger ones")
    if seen["held"] <= seen["budget"]:
        cause = _("at the end of forward it fits; but a block that is recomputed is there whole, beside what is held")
    return Finding(
        False, _("{n:.0f} MB").format(n=seen["budget"] / MB), _("{n:.0f} MB").format(n=seen["peak"] / MB), cause
    )


def least(outcome: Outcome) -> Finding:
    seen = outcome.values[0]
    if seen["seconds"] <= seen["least"] + 1e-9:
        return Finding(True)
    wanted, measured = (_("{n:.0f} ms").format(n=1e3 * seen[key]) for key in ("least", "seconds"))
    cause = _(
        "another choice fits and costs less: compare seconds and bytes of all choices, not of one block at a time"
    )
    if seen["all"]:
        cause = _("not every block needs to be a checkpoint")
    return Finding(False, wanted, measured, cause)


# --- plausible wrong answers ---


def every_block(blocks: list[BlockCost], budget: int) -> list[int]:
    return list(range(len(blocks)))


def every_other(blocks: list[BlockCost], budget: int) -> list[int]:
    return list(range(0, len(blocks), 2))


def held_after_forward(blocks: list[BlockCost], budget: int) -> list[int]:
    """The best if nothing were there in the recomputation."""

    def held(chosen: Sequence[int]) -> int:
        return sum(one.border + (0 if n in chosen else one.inside) for n, one in enumerate(blocks))

    choices = itertools.chain.from_iterable(
        itertools.combinations(range(len(blocks)), count) for count in range(len(blocks) + 1)
    )
    return list(min((each for each in choices if held(each) <= budget), key=lambda each: seconds_of(blocks, each)))


def greedily(key: Callable[[BlockCost], float], blocks: list[BlockCost], budget: int) -> list[int]:
    """One after the other by `key`, until it fits."""
    order = sorted(range(len(blocks)), key=lambda number: key(blocks[number]), reverse=True)
    chosen: list[int] = []
    while peak_of(blocks, sorted(chosen)) > budget and order:
        chosen.append(order.pop(0))
    return sorted(chosen)


def largest_first(blocks: list[BlockCost], budget: int) -> list[int]:
    return greedily(lambda one: one.inside, blocks, budget)


def from_the_front(blocks: list[BlockCost], budget: int) -> list[int]:
    return greedily(lambda one: 0.0, blocks, budget)


register(
    Exercise(
        id="choose-blocks",
        lesson="08",
        title=_("Blocks for a budget"),
        dots=3,
        minutes=15,
        answer="choose_blocks",
        hints=(
            _("`checkpointed_peak(blocks, [range(n, n + 1) for n in chosen])` gives the peak of a choice. With up to "
              "ten blocks there are at most 1,024 choices: try them all."),
            _("`itertools.combinations(range(len(blocks)), count)` gives the choices of `count` blocks. Keep those "
              "whose peak is within the budget."),
            _("Among them take the one whose `seconds` add up to the least."),
        ),
        properties=(
            Property("fits", _("the peak is within the budget"), fits),
            Property("least", _("no choice within the budget is faster"), least),
        ),
        trials=tuple(Trial(name, inputs=partial(given, name=name), drive=drive, input_names=("blocks", "budget"))
                     for name in STACKS),
        wrong_answers=(
            WrongAnswer("every block", every_block, "least", "not every block"),
            WrongAnswer("every other block", every_other, "fits", "what is held at the end of forward"),
            WrongAnswer("the end of forward only", held_after_forward, "fits", "there whole"),
            WrongAnswer("the largest first", largest_first, "least", "compare seconds and bytes"),
            WrongAnswer("from the front", from_the_front, "least", "compare seconds and bytes"),
        ),
    )
)  # fmt: skip
