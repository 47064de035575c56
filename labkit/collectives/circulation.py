"""Passing pieces round a ring: what every ring algorithm does, step by step and piece by piece.

In each step a rank sends a chunk to the next rank and receives another from the one before. Chunks travel in pieces,
and a piece goes on as soon as it is here and dealt with, so that receiving, adding and sending overlap.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from labkit.collectives.agreement import COLLECTIVE_TAG
from labkit.collectives.groups import Endpoint
from labkit.collectives.messages import Receiving, Sending, Work
from labkit.collectives.pairing import Parts, start_together
from labkit.collectives.settings import settings
from labkit.collectives.spare_memory import spare

PIECE_BYTES = 1 << 21  # near what a core caches, and large beside what a message costs
AHEAD = 2  # receives posted ahead into spare buffers


class Step(NamedTuple):
    """What a rank passes on in one step, as flat pieces.

    `incoming[i]` is where piece i arrives, or None for a spare buffer; `finish(i, piece)` deals with it. What is sent
    as piece i of the next step must be ready then. `reuses` says that `incoming` is what was sent in the step before.
    """

    outgoing: Sequence[torch.Tensor]
    incoming: Sequence[torch.Tensor | None]
    like: Sequence[torch.Tensor]  # tensors of the sizes that arrive
    finish: Callable[[int, torch.Tensor], None] | None = None
    reuses: bool = False


def pieces(chunk: torch.Tensor) -> list[torch.Tensor]:
    """A flat chunk cut into views of at most PIECE_BYTES. An empty chunk is one empty piece."""
    longest = max(1, PIECE_BYTES // chunk.element_size())
    return [chunk] if chunk.numel() <= longest else list(chunk.split(longest))


def swap(end: Endpoint, flat: torch.Tensor, finish: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Two ranks send each other all of `flat`, piece by piece.

    `finish(own piece, arrived piece)` deals with each, and may write to its own, which has left by then.
    """
    peer, own = 1 - end.place, pieces(flat)
    if end.nccl:
        targets = [spare(end, index, piece) for index, piece in enumerate(own)]
        _take_step(end, [(target, peer) for target in targets], [(piece, peer) for piece in own])
        for piece, arrived in zip(own, targets, strict=True):
            finish(piece, arrived)
        return
    arriving: deque[tuple[Receiving, torch.Tensor]] = deque()

    def post(index: int) -> None:
        target = spare(end, index % AHEAD, own[index])
        arriving.append((Receiving(end, target, peer, COLLECTIVE_TAG, headed=False), target))

    def post_first() -> None:
        for index in range(min(AHEAD, len(own))):
            post(index)

    # a message that is expected is sent at once; an emulated one has latency to spare, and counts from its sending
    if settings.emulator is None:
        post_first()
    # all at once: a piece then leaves when the other side expects it, whatever this one is busy with
    leaving = [Sending(end, piece, peer, COLLECTIVE_TAG, headed=False) for piece in own]
    if settings.emulator is not None:
        post_first()
    for index, piece in enumerate(own):
        receiving, arrived = arriving.popleft()
        receiving.wait()
        leaving[index].wait()
        finish(piece, arrived)
        if index + AHEAD < len(own):
            post(index + AHEAD)


def circulate(end: Endpoint, steps: Sequence[Step]) -> None:
    """Carry out the steps. Both neighbours must cut their chunks alike."""
    after, before = (end.place + 1) % end.size, (end.place - 1) % end.size
    if end.nccl:
        _circulate_step_by_step(end, steps, after, before)
        return
    order = [(step, piece) for step in range(len(steps)) for piece in range(len(steps[step].incoming))]
    receives: deque[tuple[Receiving, torch.Tensor]] = deque()
    sends: dict[tuple[int, int], Sending] = {}

    def send(step: int, piece: int) -> None:
        outgoing = steps[step].outgoing[piece]
        sends[step, piece] = Sending(end, outgoing, after, COLLECTIVE_TAG, headed=False)

    def post(position: int) -> None:
        step, piece = order[position]
        if steps[step].reuses:
            sends.pop((step - 1, piece)).wait()
        target = steps[step].incoming[piece]
        if target is None:
            target = spare(end, position % AHEAD, steps[step].like[piece])
        receives.append((Receiving(end, target, before, COLLECTIVE_TAG, headed=False), target))

    posted = 0

    def post_from(position: int) -> None:
        """Post what may be: AHEAD receives, and at once all that have a place of their own and none sent before."""
        nonlocal posted
        while posted < len(order) and (posted < position + AHEAD or takes_its_place(*order[posted])):
            post(posted)
            posted += 1

    def takes_its_place(step: int, piece: int) -> bool:
        return steps[step].incoming[piece] is not None and not steps[step].reuses

    # receives first: a message that is expected is sent at once, else the backend asks first
    post_from(0)
    for piece in range(len(steps[0].outgoing) if steps else 0):
        send(0, piece)
    for position, (step, piece) in enumerate(order):
        receiving, arrived = receives.popleft()
        receiving.wait()
        finish = steps[step].finish
        if finish is not None:
            finish(piece, arrived)
        if step + 1 < len(steps):
            send(step + 1, piece)
        post_from(position + 1)
    for sending in sends.values():
        sending.wait()


def _circulate_step_by_step(end: Endpoint, steps: Sequence[Step], after: int, before: int) -> None:
    for step in steps:
        targets = [
            spare(end, index, like) if incoming is None else incoming
            for index, (incoming, like) in enumerate(zip(step.incoming, step.like, strict=True))
        ]
        _take_step(end, [(target, before) for target in targets], [(piece, after) for piece in step.outgoing])
        for index, target in enumerate(targets):
            if step.finish is not None:
                step.finish(index, target)


def _take_step(end: Endpoint, receives: Parts, sends: Parts) -> None:
    """All messages of a step at once: NCCL would deadlock if both neighbours sent and received piece by piece."""
    arriving, leaving = start_together(end, receives, sends, COLLECTIVE_TAG)
    under_way: list[Work] = [*arriving, *leaving]
    for message in under_way:
        message.wait()
