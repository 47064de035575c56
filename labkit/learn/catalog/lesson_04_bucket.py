"""Lesson 04: gradients averaged in buckets."""

from collections.abc import Callable
from typing import Any

from labkit.learn.catalog.lesson_04 import all_reduces, flat
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.observations import Outcome
from labkit.learn.properties import bytes_sent, equality, messages
from labkit.words import _

#: 48, 4, 44, 4, 44 and 8 bytes: filled from the last, buckets of 48 bytes are three, from the first four
SHAPES = ((4, 3), (1,), (11,), (1,), (11,), (2,))
CAPS = (1, 48, 10_000)


def own_gradients(rank: int, world_size: int) -> tuple[Any, ...]:
    """Gradients in the order of the parameters."""
    import torch

    random = torch.Generator().manual_seed(70 + rank)
    return ([torch.randn(shape, generator=random) for shape in SHAPES],)


def with_cap(function: Callable[..., Any], gradients: list[Any], *, cap: int) -> Any:
    """Drive the answer on copies, and return them flat."""
    mine = [gradient.clone() for gradient in gradients]
    function(mine, cap)
    return flat(mine)


def with_cap_1(function: Callable[..., Any], gradients: list[Any]) -> Any:
    return with_cap(function, gradients, cap=CAPS[0])


def with_cap_48(function: Callable[..., Any], gradients: list[Any]) -> Any:
    return with_cap(function, gradients, cap=CAPS[1])


def with_cap_10_000(function: Callable[..., Any], gradients: list[Any]) -> Any:
    return with_cap(function, gradients, cap=CAPS[2])


DRIVES = dict(zip(CAPS, (with_cap_1, with_cap_48, with_cap_10_000), strict=True))


def _means(outcome: Outcome) -> list[Any]:
    size = outcome.world_size
    everyones = [flat(outcome.inputs(rank)[0]) for rank in range(size)]
    return [sum(everyones) / size] * size


def filled(lengths: list[int], cap: int, *, closes_before: bool = False) -> list[list[int]]:
    """Places of the gradients in each bucket, from the last to the first."""
    buckets: list[list[int]] = [[]]
    held = 0
    for place in reversed(range(len(lengths))):
        size = 4 * lengths[place]
        if closes_before and buckets[-1] and held + size > cap:
            buckets.append([])
            held = 0
        buckets[-1].append(place)
        held += size
        if not closes_before and held >= cap:
            buckets.append([])
            held = 0
    return [bucket for bucket in buckets if bucket]


def _lengths() -> list[int]:
    import math

    return [math.prod(shape) for shape in SHAPES]


def _cap(outcome: Outcome) -> int:
    return next(cap for cap, drive in DRIVES.items() if drive is outcome.trial.drive)


def _in_buckets(outcome: Outcome, rank: int, what: str) -> int:
    lengths = _lengths()
    sizes = [sum(lengths[place] for place in bucket) for bucket in filled(lengths, _cap(outcome))]
    return all_reduces(outcome, rank, what, sizes, 1)


def _bucket_cause(outcome: Outcome, rank: int) -> str:
    sent, wanted = outcome.ranks[rank].record.messages, _in_buckets(outcome, rank, "messages")
    each = all_reduces(outcome, rank, "messages", _lengths(), 1)
    if sent == each != wanted:
        return _("every gradient travels alone: cap_bytes is not used")
    if sent == all_reduces(outcome, rank, "messages", [sum(_lengths())], 1) != wanted:
        return _("all travel together: cap_bytes is not used")
    if sent and sent != wanted:
        return _("the buckets are cut elsewhere: go from the last gradient to the first, and close a bucket as soon as "
                 "it holds cap_bytes or more")  # fmt: skip
    return ""


def _order_cause(outcome: Outcome, rank: int) -> str:
    import torch

    found, wanted = outcome.ranks[rank].value, _means(outcome)[rank]
    if torch.allclose(found.sort().values, wanted.sort().values, rtol=1e-4, atol=1e-6):
        return _("the numbers are right and their places are not: split the flat tensor in the order in which you "
                 "joined it")  # fmt: skip
    if outcome.world_size > 1 and not outcome.ranks[rank].record.messages:
        return _("nothing is sent: is the last bucket sent, which may not be full?")
    if torch.equal(found, flat(outcome.inputs(rank)[0])):
        return _("nothing came back from the flat tensor: torch.cat makes a copy, so copy the parts back")
    right = torch.isclose(found, wanted, rtol=1e-4, atol=1e-6)
    if right.any() and not right.all():
        return _("some gradients are right, others are not: is the last bucket sent, which may not be full?")
    return ""


def _send(
    gradients: list[Any], bucket: list[int], *, divide: bool = True, back: bool = True, turn: bool = False
) -> None:
    import torch
    import torch.distributed as dist

    from labkit import collectives

    together = torch.cat([gradients[place].flatten() for place in bucket])
    collectives.all_reduce(together)
    if divide:
        together /= dist.get_world_size()
    if back:
        places = bucket[::-1] if turn else bucket
        for place, part in zip(places, together.split([gradients[p].numel() for p in places]), strict=True):
            gradients[place].copy_(part.view_as(gradients[place]))


def _buckets_of(gradients: list[Any], cap: int, **options: Any) -> list[list[int]]:
    return filled([gradient.numel() for gradient in gradients], cap, **options)


def one_by_one(gradients: list[Any], cap_bytes: int) -> None:
    for place in reversed(range(len(gradients))):
        _send(gradients, [place])


def all_together(gradients: list[Any], cap_bytes: int) -> None:
    _send(gradients, list(reversed(range(len(gradients)))))


def loses_the_last_bucket(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes):
        if sum(4 * gradients[place].numel() for place in bucket) >= cap_bytes:
            _send(gradients, bucket)


def copies_nothing_back(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes):
        _send(gradients, bucket, back=False)


def copies_back_in_another_order(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes):
        _send(gradients, bucket, turn=True)


def sums_in_buckets(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes):
        _send(gradients, bucket, divide=False)


def closes_too_early(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes, closes_before=True):
        _send(gradients, bucket)


def fills_from_the_first(gradients: list[Any], cap_bytes: int) -> None:
    turned = gradients[::-1]
    for bucket in _buckets_of(turned, cap_bytes):
        _send(turned, bucket)


register(
    Exercise(
        id="bucket",
        lesson="04",
        title=_("Write a bucket"),
        dots=2,
        minutes=15,
        answer="average_in_buckets",
        hints=(
            _("Go through `reversed(gradients)` with a list and a count of bytes. When the count reaches `cap_bytes`, "
              "send what the list holds and begin a new one. What is left at the end?"),
            _("To send: `torch.cat([g.flatten() for g in bucket])` makes one flat tensor of them; one all-reduce; "
              "divide by the number of ranks."),
            _("`flat.split([g.numel() for g in bucket])` gives the parts back in the order of the bucket: "
              "`g.copy_(part.view_as(g))`."),
        ),
        properties=(
            equality(
                _means,
                statement=_("every gradient is the mean over all ranks, in its own place"),
                cause=_order_cause,
            ),
            messages(
                lambda outcome, rank: _in_buckets(outcome, rank, "messages"),
                statement=_("by one all-reduce a bucket, closed when it holds cap_bytes or more"),
                cause=_bucket_cause,
            ),
            bytes_sent(
                lambda outcome, rank: _in_buckets(outcome, rank, "bytes"),
                statement=_("of the bucket's gradients, from the last to the first"),
                cause=_bucket_cause,
            ),
        ),
        trials=tuple(
            Trial(
                _("buckets of {cap} bytes, {ranks} ranks").format(cap=cap, ranks=ranks),
                ranks,
                own_gradients,
                DRIVES[cap],
                ("gradients",),
            )
            for ranks in (1, 2, 3)
            for cap in CAPS
        ),
        wrong_answers=(
            WrongAnswer("one by one", one_by_one, "messages", "travels alone"),
            WrongAnswer("all together", all_together, "messages", "all travel together"),
            WrongAnswer("loses the last bucket", loses_the_last_bucket, "equality", "is the last bucket sent"),
            WrongAnswer("copies nothing back", copies_nothing_back, "equality", "copy the parts back"),
            WrongAnswer("copies back in another order", copies_back_in_another_order, "equality", "their places"),
            WrongAnswer("sums", sums_in_buckets, "equality", "summed where an average is wanted"),
            WrongAnswer("closes a bucket too early", closes_too_early, "messages", "cut elsewhere"),
            WrongAnswer("fills from the first", fills_from_the_first, "messages", "cut elsewhere"),
        ),
    )
)  # fmt: skip
