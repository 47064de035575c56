"""The naive collectives: one rank talks to all others, one after the other.

Simple, and the yardstick that the better ones are held against: of an all-reduce of n bytes over N ranks the first
rank receives (N - 1) n bytes and sends as many.
"""

from typing import Any

import torch

from labkit.collectives.agreement import COLLECTIVE_TAG
from labkit.collectives.groups import Endpoint
from labkit.collectives.messages import Receiving, Sending
from labkit.collectives.reductions import combination, divide


def naive_broadcast(flat: torch.Tensor, root: int, end: Endpoint) -> None:
    """The root sends its flat tensor to every other rank of the group."""
    if end.place == root:
        others = [place for place in range(end.size) if place != root]
        for work in [Sending(end, flat, place, COLLECTIVE_TAG, headed=False) for place in others]:
            work.wait()
    else:
        Receiving(end, flat, root, COLLECTIVE_TAG, headed=False).wait()


def naive_reduce(flat: torch.Tensor, op: Any, root: int, end: Endpoint) -> None:
    """The root receives every tensor and reduces them in rank order into its own; the others' stay as they are.

    The sum is always ((x0 + x1) + x2) + ..., whatever the world size.
    """
    if end.place != root:
        Sending(end, flat, root, COLLECTIVE_TAG, headed=False).wait()
        return
    parts: list[torch.Tensor] = []
    for place in range(end.size):
        if place == root:
            parts.append(flat.clone() if place else flat)
        else:
            parts.append(torch.empty_like(flat))
            Receiving(end, parts[-1], place, COLLECTIVE_TAG, headed=False).wait()
    total = parts[0]
    for part in parts[1:]:
        combination(op)(total, part)
    divide(total, op, end.size)
    if total is not flat:
        flat.copy_(total)


def naive_all_reduce(flat: torch.Tensor, op: Any, end: Endpoint) -> None:
    """Reduce to the group's first rank in rank order, then broadcast from it."""
    naive_reduce(flat, op, 0, end)
    naive_broadcast(flat, 0, end)
