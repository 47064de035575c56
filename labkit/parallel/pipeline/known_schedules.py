"""The schedules that are in use, each as a list of actions for every rank.

Sources: GPipe: Y. Huang and others, arXiv:1811.06965, figure 2c. 1F1B: D. Narayanan and others, PipeDream,
arXiv:1806.03377, figure 4; with a flush at the end of each step, and interleaved: D. Narayanan and others, Efficient
Large-Scale Language Model Training, arXiv:2104.04473, figure 4. ZB-H1: P. Qi and others, arXiv:2401.10241, section 3.
"""

from collections.abc import Callable

from labkit.parallel.pipeline.action_lists import Schedule
from labkit.parallel.pipeline.actions import Action


def naive(ranks: int, micro_batches: int) -> Schedule:
    """One stage at a time: a micro-batch goes all the way forward and back before the next one starts."""
    _refuse_bad("naive", ranks, micro_batches)
    rows = [[Action(kind, m, r) for m in range(micro_batches) for kind in "FB"] for r in range(ranks)]
    return Schedule(tuple(map(tuple, rows)), "naive")


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards: everything stays alive in between."""
    _refuse_bad("gpipe", ranks, micro_batches)
    rows = [[Action(kind, m, r) for kind in "FB" for m in range(micro_batches)] for r in range(ranks)]
    return Schedule(tuple(map(tuple, rows)), "gpipe")


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Rank r of K warms up with K - r - 1 forwards, then one forward and one backward in turns, then the backwards that
    are left: never more than K - r micro-batches alive."""
    _refuse_bad("1f1b", ranks, micro_batches)
    rows = []
    for r in range(ranks):
        forwards = [Action("F", m, r) for m in range(micro_batches)]
        backwards = [Action("B", m, r) for m in range(micro_batches)]
        rows.append(_in_turns(forwards, backwards, warm_up=ranks - r - 1))
    return Schedule(tuple(rows), "1f1b")


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B with `chunks` stages a rank: rank r has the stages r, r + K, r + 2 K, ... Micro-batches go in rounds of K
    through one chunk after the other; where K does not divide their number, in fewer rounds of more. The bubble is
    divided by `chunks`, and there are about `chunks` times as many messages."""
    _refuse_bad("interleaved", ranks, micro_batches)
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"interleaved: chunks is {chunks!r}; give the number of stages on each rank, 1 or more")
    count = max(1, micro_batches // ranks)
    ends = [micro_batches * (number + 1) // count for number in range(count)]
    rounds = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    order = [(chunk, m) for some in rounds for chunk in range(chunks) for m in some]
    back = [(chunk, m) for some in rounds for chunk in reversed(range(chunks)) for m in some]
    rows = []
    for r in range(ranks):
        forwards = [Action("F", m, chunk * ranks + r) for chunk, m in order]
        backwards = [Action("B", m, chunk * ranks + r) for chunk, m in back]
        # the first backward of a rank waits for a whole round to have passed all chunks, and to come back from the end
        first_round = max(map(len, rounds)) * (chunks - 1)
        rows.append(_in_turns(forwards, backwards, warm_up=first_round + (2 if chunks > 1 else 1) * (ranks - r - 1)))
    return Schedule(tuple(rows), "interleaved")


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with the backward in two: I at once, W later. Rank r is r micro-batches behind with W, and so fills with
    them what would be its bubble; like 1F1B's first rank each keeps at most K alive."""
    _refuse_bad("zb-h1", ranks, micro_batches)
    rows = []
    for r in range(ranks):
        behind, row = r, [Action("F", m, r) for m in range(min(ranks - r, micro_batches))]
        following = iter(range(len(row), micro_batches))
        for m in range(micro_batches):
            row.append(Action("I", m, r))
            if m >= behind:
                row.append(Action("W", m - behind, r))
            row += [Action("F", n, r) for n in [next(following, -1)] if n >= 0]
        row += [Action("W", m, r) for m in range(max(0, micro_batches - behind), micro_batches)]
        rows.append(tuple(row))
    return Schedule(tuple(rows), "zb-h1")


#: name: (ranks, micro_batches) -> Schedule; interleaved has two chunks a rank here
KNOWN: dict[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}


def _in_turns(forwards: list[Action], backwards: list[Action], *, warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards; one forward and one backward in turns; the backwards that are left."""
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[max(0, len(forwards) - warm_up) :])


def _refuse_bad(name: str, ranks: int, micro_batches: int) -> None:
    for what, value in (("ranks", ranks), ("micro_batches", micro_batches)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {what} is {value!r}; give a whole number, 1 or more")
