"""Lesson 09: how a schedule that an answer writes down is read, judged, and compared with known ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.learn.exercises import Trial
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

Rows = list[str]
SIZES = ((1, 3), (2, 3), (3, 6), (4, 8), (4, 2))


def read(value: Any, ranks: int) -> Any:
    """The learner's rows as a Schedule; refused where they are none."""
    from labkit.parallel.pipeline import Schedule

    wanted = _("a list of {ranks} texts of actions, as ['F0 F1 B0 B1', ...]").format(ranks=ranks)
    rows = list(value) if isinstance(value, list | tuple) else None
    if rows is None or len(rows) != ranks:
        raise Nonsense(describe(value), wanted)
    try:
        return Schedule.of(rows)
    except (ValueError, TypeError, AttributeError) as error:
        raise Nonsense(str(error), wanted) from None


def sizes(rank: int, world_size: int, *, ranks: int, micro_batches: int) -> tuple[Any, ...]:
    return ranks, micro_batches


def write(function: Callable[..., Any], ranks: int, micro_batches: int) -> Any:
    """The schedule that the answer writes down."""
    return read(function(ranks, micro_batches), ranks), None


def schedule_of(outcome: Outcome) -> Any:
    return outcome.values[0][0]


def faults(outcome: Outcome) -> list[str]:
    from labkit.parallel.pipeline import schedule_faults

    ranks, micro_batches = outcome.inputs(0)
    return schedule_faults(schedule_of(outcome), ranks=ranks, stages=ranks, micro_batches=micro_batches)


def can_run(outcome: Outcome) -> Finding:
    found = faults(outcome)
    if not found:
        return Finding(True)
    causes = {
        "missing send": _("an action is missing: a rank waits for what nobody sends"),
        "nobody runs": _("an action is missing: every micro-batch needs a forward and a backward on every rank"),
        "deadlock": _("the ranks wait for each other in a circle: compare the orders of their micro-batches"),
        "before its": _("an action stands before what it needs"),
        "micro-batches, not for": _(
            "not the micro-batches that it should have: they count from 0 to micro_batches - 1"
        ),
        "but no backward for inputs": _("W is what I has left over: write I before it, or B for both at once"),
        "times: once": _("an action is written twice: each one comes once, with the number of its micro-batch"),
        "a stage has one rank": _("rank r has stage r: write actions without a stage in front, or with the rank's own"),
    }
    cause = next((words for part, words in causes.items() if part in found[0]), "")
    return Finding(False, _("a schedule that can run"), found[0], cause)


def simulated(schedule: Any) -> Any:
    """With forward, I and W of one unit each, and free links."""
    from fractions import Fraction

    from labkit.parallel.pipeline import Costs, simulate

    return simulate(schedule, Costs(Fraction(1), Fraction(2)))


def keeps_at_most(most: Callable[[int, int, int], int], outcome: Outcome) -> Finding:
    """On each rank at most `most(rank, ranks, micro_batches)` micro-batches alive."""
    ranks, micro_batches = outcome.inputs(0)
    peaks = schedule_of(outcome).peak_alive
    for rank, peak in enumerate(peaks):
        allowed = most(rank, ranks, micro_batches)
        if peak > allowed:
            wanted = _("rank {rank}: at most {allowed} micro-batches alive").format(rank=rank, allowed=allowed)
            cause = _("more forwards than needed before the first backward")
            if any(action.kind == "W" for action in schedule_of(outcome).rows[rank]):
                cause = _("activations stay until W: it is put off for too long")
            elif peak == micro_batches:
                cause = _("all forwards come first: that is GPipe")
            return Finding(False, wanted, _("{peak} alive").format(peak=peak), cause)
    return Finding(True)


def has_bubble(share_of_1f1b: float, outcome: Outcome) -> Finding:
    """The simulated bubble is at most so much of 1F1B's, which is 3 (K - 1) where there are K micro-batches."""
    if faults(outcome):
        return Finding(False, _("a bubble"), _("it can't run"))
    from labkit.parallel.pipeline import one_f_one_b

    allowed = share_of_1f1b * simulated(one_f_one_b(*outcome.inputs(0))).bubble
    found = simulated(schedule_of(outcome)).bubble
    if found <= allowed:
        return Finding(True)
    wanted = _("a bubble of at most {allowed:g} units, F, I and W taking 1 each").format(allowed=float(allowed))
    return Finding(False, wanted, _("{found:g} units").format(found=float(found)), _bubble_cause(outcome, found))


def _bubble_cause(outcome: Outcome, found: Any) -> str:
    from labkit.parallel.pipeline import naive, one_f_one_b

    ranks, micro_batches = outcome.inputs(0)
    kinds = {action.kind for row in schedule_of(outcome).rows for action in row}
    if found == simulated(naive(ranks, micro_batches)).bubble:
        return _("one rank works at a time: a micro-batch need not wait until the one before is back")
    if found == simulated(one_f_one_b(ranks, micro_batches)).bubble and "I" not in kinds:
        return _("that is the bubble of GPipe and 1F1B: a whole backward keeps the rank before waiting for its W")
    if "W" in kinds:
        return _("W right behind its I fills no bubble: put it off to where the rank would wait")
    return _("a rank waits where it could work: compare the order of its micro-batches with the ranks beside it")


LEGAL = Property("legal", _("every action is there once, in an order that can run"), can_run)


def trials_of(pairs: Any, drive: Any = write, real: bool = False) -> tuple[Trial, ...]:
    """A trial for each (ranks, micro-batches); `real` ones run on as many ranks."""
    return tuple(
        Trial(
            _("{ranks} ranks, {micro_batches} micro-batches").format(ranks=ranks, micro_batches=micro_batches),
            ranks if real else 1,
            partial(sizes, ranks=ranks, micro_batches=micro_batches),
            drive,
            ("ranks", "micro_batches"),
        )
        for ranks, micro_batches in pairs
    )


def _text(known: str, ranks: int, micro_batches: int) -> Rows:
    from labkit.parallel.pipeline import KNOWN

    return [" ".join(map(str, row)) for row in KNOWN[known](ranks, micro_batches).rows]


def one_at_a_time(ranks: int, micro_batches: int) -> Rows:
    return _text("naive", ranks, micro_batches)


def like_gpipe(ranks: int, micro_batches: int) -> Rows:
    return _text("gpipe", ranks, micro_batches)


def like_1f1b(ranks: int, micro_batches: int) -> Rows:
    return _text("1f1b", ranks, micro_batches)
