"""Lesson 09: GPipe's schedule as a list of actions."""

from functools import partial

from labkit.learn.catalog.lesson_09_schedules import (
    LEGAL,
    SIZES,
    Rows,
    has_bubble,
    like_1f1b,
    like_gpipe,
    one_at_a_time,
    schedule_of,
    trials_of,
)
from labkit.learn.exercises import Exercise, WrongAnswer, register
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _


def forwards_first(outcome: Outcome) -> Finding:
    for rank, row in enumerate(schedule_of(outcome).rows):
        kinds = "".join(action.kind for action in row)
        if kinds != "".join(sorted(kinds, key="FBIW".index)):
            cause = _("a backward comes before the last forward: that is another schedule")
            return Finding(False, _("all forwards, then all backwards"), f"rank {rank}: {kinds}", cause)
    return Finding(True)


def loses_the_last(ranks: int, micro_batches: int) -> Rows:
    return [row.rsplit(" ", 1)[0] for row in like_gpipe(ranks, micro_batches)]


def counts_from_one(ranks: int, micro_batches: int) -> Rows:
    numbers = range(1, micro_batches + 1)
    return [" ".join(f"{kind}{number}" for kind in "FB" for number in numbers)] * ranks


def backwards_first(ranks: int, micro_batches: int) -> Rows:
    return [" ".join(sorted(row.split(), key=lambda one: "F" in one)) for row in like_gpipe(ranks, micro_batches)]


def all_on_stage_0(ranks: int, micro_batches: int) -> Rows:
    return [like_gpipe(1, micro_batches)[0]] * ranks


def each_rank_its_own_order(ranks: int, micro_batches: int) -> Rows:
    rows = []
    for rank in range(ranks):
        order = [(number + rank) % micro_batches for number in range(micro_batches)]
        rows.append(" ".join(f"{kind}{number}" for kind in "FB" for number in order))
    return rows


register(
    Exercise(
        id="gpipe-list",
        lesson="09",
        title=_("GPipe as a list of actions"),
        dots=1,
        minutes=8,
        answer="gpipe_rows",
        hints=(
            _("One text a rank. Which actions does rank 0 run, in which order? And rank 1?"),
            _("All ranks run the same: F0 F1 ... and then B0 B1 ... Waiting is not written down."),
            _("`' '.join([f'F{m}' for m in range(micro_batches)] + ...)`, the same text for each rank."),
        ),
        properties=(
            LEGAL,
            Property("order", _("all forwards come before all backwards"), forwards_first),
            Property("bubble", _("the bubble is no larger than GPipe's"), partial(has_bubble, 1.0)),
        ),
        trials=trials_of(SIZES),
        wrong_answers=(
            WrongAnswer("one at a time", one_at_a_time, "order", "a backward comes before the last forward"),
            WrongAnswer("1F1B", like_1f1b, "order", "that is another schedule"),
            WrongAnswer("loses the last backward", loses_the_last, "legal", "an action is missing"),
            WrongAnswer("counts from one", counts_from_one, "legal", "they count from 0"),
            WrongAnswer("backwards first", backwards_first, "legal", "before what it needs"),
            WrongAnswer("all on stage 0", all_on_stage_0, "legal", "rank r has stage r"),
            WrongAnswer("each rank its own order", each_rank_its_own_order, "bubble", "compare the order"),
        ),
    )
)
