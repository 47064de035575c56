"""Lesson 00: each rank's share of a data set when the sizes don't divide."""

import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

LENGTHS = (12, 10, 7, 3, 1, 0)
WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7)


def all_shares(share: Any, *, length: int, ranks: int) -> list[list[int]]:
    """The indices that `share(length, rank, ranks)` gives to each rank, as lists."""
    return [indices(share(length, rank, ranks), length, rank) for rank in range(ranks)]


def indices(given: Any, length: int, rank: int) -> list[int]:
    """A share as a list of indices: a slice is taken of the data set, anything else must hold whole numbers."""
    wanted = _("a range, a slice, or a list of whole numbers")
    if isinstance(given, slice):
        return list(range(length))[given]
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, dict)):
        raise Nonsense(_("for rank {rank}: {what}").format(rank=rank, what=describe(given)), wanted)
    # one that never ends is cut
    listed = list(islice(given, 10 * length + 100))
    for item in listed:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            text = _("for rank {rank}: {what}, which holds {item}")
            raise Nonsense(text.format(rank=rank, what=describe(given), item=describe(item)), wanted)
    return [item.__index__() for item in listed]


def named(items: list[int]) -> str:
    """The first of them, and whether there are more."""
    return ", ".join(map(str, items[:5])) + (", …" if len(items) > 5 else "")


def _length(outcome: Outcome) -> int:
    return int(outcome.trial.drive.keywords["length"])  # type: ignore[attr-defined]


def _coverage(outcome: Outcome) -> Finding:
    length, shares = _length(outcome), outcome.values[0]
    counts = Counter(index for share in shares for index in share)
    wanted = _("each of the samples 0 to {last} exactly once").format(last=length - 1) if length else _("no sample")
    beyond = sorted(index for index in counts if not 0 <= index < length)
    twice = sorted(index for index in counts if counts[index] > 1 and 0 <= index < length)
    missing = [index for index in range(length) if index not in counts]
    if beyond:
        return Finding(False, wanted, _("sample {index} does not exist").format(index=beyond[0]), _beyond(beyond))
    if twice:
        ranks = [rank for rank, share in enumerate(shares) if twice[0] in share]
        measured = _("sample {index} is in the shares of ranks {ranks}").format(index=twice[0], ranks=named(ranks))
        if len(ranks) == 1:
            measured = _("sample {index} is twice in the share of rank {rank}").format(index=twice[0], rank=ranks[0])
        return Finding(False, wanted, measured, _twice(shares, ranks, length, complete=not missing))
    if missing:
        return Finding(
            False, wanted, _("in no share: {samples}").format(samples=named(missing)), _missing(shares, missing)
        )
    return Finding(True)


def _beyond(beyond: list[int]) -> str:
    if beyond[0] < 0:
        return _("an index below 0 counts from the end of the data set")
    return _("a share runs past the end: limit its stop to the length")


def _twice(shares: list[list[int]], ranks: list[int], length: int, *, complete: bool) -> str:
    sizes = {len(share) for share in shares}
    if sizes == {length}:
        return _("every rank gets the whole data set")
    if complete and len(sizes) == 1:
        return _("shares are filled up to one size with samples that others have (padding)")
    if len(ranks) == 2 and ranks[1] == ranks[0] + 1:
        return _("neighbouring shares overlap: the stop of a range is not part of it, so no + 1 is needed")
    return ""


def _missing(shares: list[list[int]], missing: list[int]) -> str:
    length = sum(map(len, shares)) + len(missing)
    if len(missing) == length % len(shares) and missing == list(range(length - len(missing), length)):
        return _("length // world_size drops the remainder: these are the last length % world_size samples")
    if len(missing) == len(shares):
        return _("a share stops one too early: the stop of a range is not part of it")
    return ""


def _balance(outcome: Outcome) -> Finding:
    shares = outcome.values[0]
    sizes = [len(share) for share in shares]
    if max(sizes) - min(sizes) <= 1:
        return Finding(True)
    wanted = _("sizes that differ by at most one")
    measured = _("sizes {sizes}").format(sizes=", ".join(map(str, sizes)))
    rounded_up = math.ceil(sum(sizes) / len(sizes))
    if sizes[-1] == max(sizes) and len(set(sizes[:-1])) == 1:
        cause = _("the last rank takes the whole remainder: hand it out one sample a rank")
    elif sizes[0] == rounded_up and sizes == sorted(sizes, reverse=True):
        cause = _("each share is rounded up, so the last ranks get what is left, or nothing")
    else:
        cause = _("some ranks wait for the largest share in every epoch")
    return Finding(False, wanted, measured, cause)


def drops_the_tail(length: int, rank: int, world_size: int) -> range:
    size = length // world_size
    return range(rank * size, (rank + 1) * size)


def last_takes_the_rest(length: int, rank: int, world_size: int) -> range:
    size = length // world_size
    return range(rank * size, length if rank == world_size - 1 else (rank + 1) * size)


def rounds_up(length: int, rank: int, world_size: int) -> range:
    size = math.ceil(length / world_size)
    return range(min(rank * size, length), min((rank + 1) * size, length))


def rounds_up_past_the_end(length: int, rank: int, world_size: int) -> range:
    size = math.ceil(length / world_size)
    return range(rank * size, (rank + 1) * size)


def pads_with_the_first(length: int, rank: int, world_size: int) -> list[int]:
    size = math.ceil(length / world_size)
    padded = [index % length for index in range(size * world_size)]
    return padded[rank::world_size]


def overlaps_by_one(length: int, rank: int, world_size: int) -> range:
    start, stop = rank * length // world_size, (rank + 1) * length // world_size
    return range(start, min(stop + 1, length))


def stops_one_early(length: int, rank: int, world_size: int) -> range:
    start, stop = rank * length // world_size, (rank + 1) * length // world_size
    return range(start, stop - 1)


def gives_everything(length: int, rank: int, world_size: int) -> range:
    return range(length)


def counts_ranks_from_one(length: int, rank: int, world_size: int) -> range:
    return range(rank - 1, length, world_size)


register(
    Exercise(
        id="shares",
        lesson="00",
        title=_("A fair share"),
        dots=1,
        minutes=8,
        answer="share",
        hints=(
            _("Take 10 samples and 4 ranks, and write down by hand who gets which. How many does each get?"),
            _("`divmod(length, world_size)` gives the size that every rank gets at least, and how many are left over."),
            _("The first `left_over` ranks take one more. Where does a rank start, then? At `rank` times the size, "
              "plus the extra samples of the ranks before it: `min(rank, left_over)`."),
        ),
        properties=(
            Property("coverage", _("every sample is in exactly one share"), _coverage),
            Property("balance", _("the shares differ by at most one sample"), _balance),
        ),
        trials=tuple(
            Trial(
                _("length {length}, world size {ranks}").format(length=length, ranks=ranks),
                drive=partial(all_shares, length=length, ranks=ranks),
            )
            for length in LENGTHS
            for ranks in WORLD_SIZES
        ),
        wrong_answers=(
            WrongAnswer("drops the tail", drops_the_tail, "coverage", "drops the remainder"),
            WrongAnswer("the last rank takes the rest", last_takes_the_rest, "balance", "takes the whole remainder"),
            WrongAnswer("rounds every share up", rounds_up, "balance", "rounded up"),
            WrongAnswer("rounds up past the end", rounds_up_past_the_end, "coverage", "runs past the end"),
            WrongAnswer("pads with the first samples", pads_with_the_first, "coverage", "padding"),
            WrongAnswer("overlaps by one", overlaps_by_one, "coverage", "overlap"),
            WrongAnswer("stops one early", stops_one_early, "coverage", "one too early"),
            WrongAnswer("gives everything to everybody", gives_everything, "coverage", "whole data set"),
            WrongAnswer("counts ranks from one", counts_ranks_from_one, "coverage", "below 0"),
        ),
    )
)  # fmt: skip
