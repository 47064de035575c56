"""Recursive halving and doubling: the bytes of the ring in 2 log2 N messages.

Halving: partners at distance N/2, N/4, ..., 1 exchange halves of what each still holds and add. Doubling: back.
World sizes that are no power of two are folded first: of each of the first pairs the even rank hands its tensor to
the odd one, stands aside, and gets the result in the end; that costs the whole tensor twice.
Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH,
IJHPCA 19 (2005), section 4.5 (Rabenseifner's algorithm).
"""

from typing import Any

import torch

from labkit.collectives.agreement import COLLECTIVE_TAG
from labkit.collectives.groups import Endpoint
from labkit.collectives.messages import Receiving, Sending
from labkit.collectives.pairing import start_together
from labkit.collectives.reductions import combination, divide


def halving_doubling_all_reduce(flat: torch.Tensor, op: Any, end: Endpoint) -> None:
    """All-reduce a flat contiguous tensor in place."""
    power = 1 << (end.size.bit_length() - 1)
    folded = end.size - power  # pairs in which one stands aside
    if end.place < 2 * folded and end.place % 2 == 0:
        Sending(end, flat, end.place + 1, COLLECTIVE_TAG, headed=False).wait()
        Receiving(end, flat, end.place + 1, COLLECTIVE_TAG, headed=False).wait()
        return
    if end.place < 2 * folded:
        part = torch.empty_like(flat)
        Receiving(end, part, end.place - 1, COLLECTIVE_TAG, headed=False).wait()
        combination(op)(flat, part)
    _halve_and_double(flat, op, end, power, folded)
    if end.place < 2 * folded:
        Sending(end, flat, end.place - 1, COLLECTIVE_TAG, headed=False).wait()


def _halve_and_double(flat: torch.Tensor, op: Any, end: Endpoint, power: int, folded: int) -> None:
    number = end.place // 2 if end.place < 2 * folded else end.place - folded  # among those that take part

    def place_of(other: int) -> int:
        return 2 * other + 1 if other < folded else other + folded

    held, sent_away = flat, []
    distance = power // 2
    while distance:
        partner = place_of(number ^ distance)
        lower, upper = held.tensor_split(2)
        kept, given = (lower, upper) if not number & distance else (upper, lower)
        part = torch.empty_like(kept)
        _exchange(given, part, partner, end)
        combination(op)(kept, part)
        sent_away.append((partner, kept, given))
        held, distance = kept, distance // 2
    divide(held, op, end.size)
    for partner, kept, given in reversed(sent_away):
        _exchange(kept, given, partner, end)


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, place: int, end: Endpoint) -> None:
    (receiving,), (sending,) = start_together(end, [(incoming, place)], [(outgoing, place)], COLLECTIVE_TAG)
    receiving.wait()
    sending.wait()
