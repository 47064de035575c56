"""Lesson 09: schedules as lists of actions: GPipe's, 1F1B's, and one of one's own under a budget."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

Rows = list[str]
SIZES = ((1, 3), (2, 3), (3, 6), (4, 8), (4, 2))
RACES = ((2, 4), (3, 6), (4, 8))


# --- driving ---


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


def stages(count: int) -> list[Any]:
    """The same small stages on every rank."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(count)]


def batch(micro_batches: int) -> Any:
    """Rows [2 M - 1, 5]: one micro-batch has one row less than the others."""
    import torch

    return torch.randn(2 * micro_batches - 1, 5, generator=torch.Generator().manual_seed(90))


def loss(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def write_and_run(function: Callable[..., Any], ranks: int, micro_batches: int) -> Any:
    """The schedule, and this rank's gradient after a step of it on real ranks; None where it can't run."""
    import torch
    import torch.distributed as dist

    from labkit.parallel.pipeline import PipelineSchedule, PipelineStage, schedule_faults

    made = read(function(ranks, micro_batches), ranks)
    if schedule_faults(made, ranks=ranks, stages=ranks, micro_batches=micro_batches):
        return made, None
    stage = PipelineStage(stages(ranks)[dist.get_rank()], dist.get_rank(), ranks, "cpu")
    x = batch(micro_batches)
    PipelineSchedule(stage, made, loss_fn=loss).step(x, target=x)
    gradients: list[Any] = [parameter.grad for parameter in stage.submodule.parameters()]
    return made, torch.cat([gradient.flatten() for gradient in gradients])


# --- judging ---


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


def forwards_first(outcome: Outcome) -> Finding:
    for rank, row in enumerate(schedule_of(outcome).rows):
        kinds = "".join(action.kind for action in row)
        if kinds != "".join(sorted(kinds, key="FBIW".index)):
            cause = _("a backward comes before the last forward: that is another schedule")
            return Finding(False, _("all forwards, then all backwards"), f"rank {rank}: {kinds}", cause)
    return Finding(True)


def right_gradient(outcome: Outcome) -> Finding:
    """Each rank's gradient is one process's."""
    import torch

    ranks, micro_batches = outcome.inputs(0)
    modules, x = stages(ranks), batch(micro_batches)
    value = x
    for module in modules:
        value = module(value)
    loss(value, x).backward()
    for rank, (_schedule, found) in enumerate(outcome.values):
        if found is None:
            return Finding(False, _("the gradient of one process"), _("it can't run"))
        wanted = torch.cat([parameter.grad.flatten() for parameter in modules[rank].parameters()])
        if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-6):
            told = _("rank {rank}: length {length:.4g}").format(rank=rank, length=float(found.norm()))
            return Finding(False, _("length {length:.4g}").format(length=float(wanted.norm())), told)
    return Finding(True)


LEGAL = Property("legal", _("every action is there once, in an order that can run"), can_run)


def _trials(pairs: Any, drive: Any = write, real: bool = False) -> tuple[Trial, ...]:
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


# --- plausible wrong answers ---


def _text(known: str, ranks: int, micro_batches: int) -> Rows:
    from labkit.parallel.pipeline import KNOWN

    return [" ".join(map(str, row)) for row in KNOWN[known](ranks, micro_batches).rows]


def one_at_a_time(ranks: int, micro_batches: int) -> Rows:
    return _text("naive", ranks, micro_batches)


def like_gpipe(ranks: int, micro_batches: int) -> Rows:
    return _text("gpipe", ranks, micro_batches)


def like_1f1b(ranks: int, micro_batches: int) -> Rows:
    return _text("1f1b", ranks, micro_batches)


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


def w_at_once(ranks: int, micro_batches: int) -> Rows:
    rows = [row.split() for row in like_1f1b(ranks, micro_batches)]
    split = [
        [one.replace("B", "I") + (f" {one.replace('B', 'W')}" if "B" in one else "") for one in row] for row in rows
    ]
    return [" ".join(row) for row in split]


def w_at_the_end(ranks: int, micro_batches: int) -> Rows:
    rows = [row.replace("B", "I") for row in like_1f1b(ranks, micro_batches)]
    return [f"{row} {' '.join(f'W{number}' for number in range(micro_batches))}" for row in rows]


def forgets_i(ranks: int, micro_batches: int) -> Rows:
    return [row.replace("B", "W") for row in like_1f1b(ranks, micro_batches)]


def forgets_w(ranks: int, micro_batches: int) -> Rows:
    return [row.replace("B", "I") for row in like_1f1b(ranks, micro_batches)]


# --- the exercises ---


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
        trials=_trials(SIZES),
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
        trials=_trials(SIZES),
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
register(
    Exercise(
        id="race",
        lesson="09",
        title=_("The race: your own schedule"),
        dots=3,
        minutes=25,
        answer="my_rows",
        hints=(
            _("In 1F1B rank r waits for r ranks to fill the pipeline, and for r to empty it. What could it do in "
              "this time that nobody waits for?"),
            _("Write I for the part of a backward that the rank before waits for, and W for the rest. Keep 1F1B's "
              "order of F and I. Rank K - 1 keeps one micro-batch alive in 1F1B and may keep K: it may put W off."),
            _("Let rank r be r micro-batches behind with W: after I of micro-batch m comes W of m - r, then the next "
              "F. What is left of W comes at the end."),
        ),
        properties=(
            LEGAL,
            Property(
                "activations",
                _("no rank keeps more than K micro-batches alive, the most that 1F1B keeps"),
                partial(keeps_at_most, lambda rank, ranks, micro_batches: ranks),
            ),
            Property("bubble", _("the bubble is at most half of 1F1B's"), partial(has_bubble, 0.5)),
            Property("gradients", _("on real ranks every gradient is that of one process"), right_gradient),
        ),
        trials=_trials(RACES, write_and_run, real=True),
        wrong_answers=(
            WrongAnswer("GPipe", like_gpipe, "activations", "that is GPipe"),
            WrongAnswer("1F1B", like_1f1b, "bubble", "that is the bubble of GPipe and 1F1B"),
            WrongAnswer("one at a time", one_at_a_time, "bubble", "one rank works at a time"),
            WrongAnswer("W at once", w_at_once, "bubble", "W right behind its I fills no bubble"),
            WrongAnswer("W at the end", w_at_the_end, "activations", "put off for too long"),
            WrongAnswer("forgets I", forgets_i, "legal", "W is what I has left over"),
            WrongAnswer("forgets W", forgets_w, "legal", "an action is missing"),
        ),
    )
)  # fmt: skip
