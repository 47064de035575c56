"""Lesson 03: all-gather by a ring."""

from typing import Any

from labkit.learn.catalog.lesson_03 import ITEMSIZE, contributions, flow, length_of, returned, seven, swap
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.observations import Outcome
from labkit.learn.properties import bytes_sent, equality, messages
from labkit.words import _


def _gathered(outcome: Outcome) -> list[Any]:
    import torch

    return [torch.cat(contributions(outcome))] * outcome.world_size


def gathers_in_arriving_order(piece: Any) -> Any:
    import torch

    size = flow(piece)[0]
    found, passing = [piece], piece
    for _step in range(size - 1):
        arrived = passing.clone()
        swap(passing, arrived)
        found.append(arrived)
        passing = arrived
    return torch.cat(found)


def sends_its_own_piece_every_time(piece: Any) -> Any:
    import torch

    size, me, _chunks = flow(piece)
    parts = [piece] * size
    for step in range(size - 1):
        arrived = piece.clone()
        swap(piece, arrived)
        parts[(me - step - 1) % size] = arrived
    return torch.cat(parts)


def passes_everything_found(piece: Any) -> Any:
    import torch

    size, me, _chunks = flow(piece)
    parts = torch.zeros(size, len(piece))
    parts[me] = piece
    for _step in range(size - 1):
        arrived = parts.clone()
        swap(parts, arrived)
        parts = torch.where(parts != 0, parts, arrived)
    return parts.flatten()


def keeps_only_its_own(piece: Any) -> Any:
    return piece.repeat(flow(piece)[0])


register(
    Exercise(
        id="ring-gather",
        lesson="03",
        title=_("All-gather by a ring"),
        dots=2,
        minutes=12,
        answer="ring_gather",
        hints=(
            _("Only the ring's second phase: N - 1 steps, nothing is added."),
            _("In each step pass on what you received in the step before; in the first step your own piece."),
            _("What arrives in step s started on rank `(rank - s - 1) % N`: that is its place in the result."),
        ),
        properties=(
            equality(_gathered, statement=_("every rank holds all pieces, in rank order")),
            bytes_sent(
                lambda outcome, rank: (outcome.world_size - 1) * length_of(outcome) * ITEMSIZE,
                statement=_("each rank sends N - 1 pieces"),
            ),
            messages(lambda outcome, rank: outcome.world_size - 1, statement=_("in N - 1 messages")),
        ),
        trials=tuple(
            Trial(_("pieces of 7 on {ranks} ranks").format(ranks=ranks), ranks, seven, returned, ("piece",))
            for ranks in (1, 2, 3, 4)
        ),
        wrong_answers=(
            WrongAnswer("in the order of arrival", gathers_in_arriving_order, "equality", ""),
            WrongAnswer("sends its own piece every time", sends_its_own_piece_every_time, "equality", ""),
            WrongAnswer("passes on everything it has", passes_everything_found, "bytes", "times what is needed"),
            WrongAnswer("keeps only its own", keeps_only_its_own, "equality", ""),
        ),
    )
)  # fmt: skip
