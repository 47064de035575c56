"""Lesson 09: 1F1B's schedule as a list of actions."""

from collections.abc import Callable
from functools import partial

from labkit.learn.catalog.lesson_09_schedules import (
    LEGAL,
    SIZES,
    Rows,
    has_bubble,
    keeps_at_most,
    like_1f1b,
    like_gpipe,
    one_at_a_time,
    trials_of,
)
from labkit.learn.exercises import Exercise, WrongAnswer, register
from labkit.learn.properties import Property
from labkit.words import _


def _in_turns(ranks: int, micro_batches: int, warm_up: Callable[[int], int]) -> Rows:
    rows = []
    for rank in range(ranks):
        first = max(0, min(micro_batches, warm_up(rank)))
        row = [f"F{number}" for number in range(first)]
        for number in range(micro_batches - first):
            row += [f"F{first + number}", f"B{number}"]
        rows.append(" ".join(row + [f"B{number}" for number in range(micro_batches - first, micro_batches)]))
    return rows


def cools_down_from_the_first(ranks: int, micro_batches: int) -> Rows:
    rows = []
    for rank in range(ranks):
        warm = min(ranks - rank - 1, micro_batches)
        row = [f"F{number}" for number in range(warm)]
        for number in range(micro_batches - warm):
            row += [f"F{warm + number}", f"B{number}"]
        rows.append(" ".join(row + [f"B{number}" for number in range(warm)]))
    return rows


def warms_up_too_long(ranks: int, micro_batches: int) -> Rows:
    return _in_turns(ranks, micro_batches, lambda rank: ranks - rank)


def warms_up_too_short(ranks: int, micro_batches: int) -> Rows:
    return _in_turns(ranks, micro_batches, lambda rank: ranks - rank - 2)


def warms_up_alike(ranks: int, micro_batches: int) -> Rows:
    return _in_turns(ranks, micro_batches, lambda rank: ranks - 1)


def forgets_to_cool_down(ranks: int, micro_batches: int) -> Rows:
    rows = [row.split() for row in like_1f1b(ranks, micro_batches)]
    return [" ".join(row[: 1 + max(place for place, one in enumerate(row) if "F" in one)]) for row in rows]


register(
    Exercise(
        id="one-f-one-b",
        lesson="09",
        title=_("1F1B: warm-up, steady state, cool-down"),
        dots=2,
        minutes=12,
        answer="one_f_one_b_rows",
        hints=(
            _("The last rank needs no warm-up: F0 B0 F1 B1 ... How many forwards must the rank before it be ahead?"),
            _(
                "Rank r of K warms up with K - r - 1 forwards, if there are as many. Then F and B in turns, F first, "
                "until no F is left. Then the backwards that are left."
            ),
            _(
                "`row = [f'F{m}' for m in range(warm)]`, then for each m below M - warm: `F{warm + m}` and `B{m}`, "
                "then `B{m}` for the last `warm` micro-batches."
            ),
        ),
        properties=(
            LEGAL,
            Property(
                "activations",
                _("rank r keeps at most K - r micro-batches alive"),
                partial(keeps_at_most, lambda rank, ranks, micro_batches: ranks - rank),
            ),
            Property("bubble", _("the bubble is no larger than GPipe's"), partial(has_bubble, 1.0)),
        ),
        trials=trials_of(SIZES),
        wrong_answers=(
            WrongAnswer("GPipe", like_gpipe, "activations", "that is GPipe"),
            WrongAnswer("one at a time", one_at_a_time, "bubble", "one rank works at a time"),
            WrongAnswer("warms up too long", warms_up_too_long, "activations", "more forwards than needed"),
            WrongAnswer("warms up too short", warms_up_too_short, "bubble", "one rank works at a time"),
            WrongAnswer("warms up alike on all ranks", warms_up_alike, "activations", "more forwards than needed"),
            WrongAnswer("cools down from the first", cools_down_from_the_first, "legal", "is written twice"),
            WrongAnswer("forgets to cool down", forgets_to_cool_down, "legal", "an action is missing"),
        ),
    )
)
