"""The binomial tree: log2 N rounds, in each of which twice as many ranks take part.

Few rounds make it quick for small messages; for large ones its root sends the whole tensor in every round.
Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH,
IJHPCA 19 (2005), sections 4.2 and 4.4.
"""

from typing import Any

import torch

from labkit.collectives.agreement import COLLECTIVE_TAG
from labkit.collectives.groups import Endpoint
from labkit.collectives.messages import Receiving, Sending
from labkit.collectives.reductions import combination, divide


def parent_and_children(place: int, root: int, size: int) -> tuple[int | None, list[int]]:
    """The rank above `place` in the tree of `root`, None for the root, and those below, the smallest subtree first.

    Numbered from the root, a rank's parent is its number without the lowest bit that is set.
    """
    number = (place - root) % size
    lowest = number & -number if number else 1 << size.bit_length()
    parent = None if number == 0 else (number - lowest + root) % size
    children, bit = [], 1
    while bit < lowest and number + bit < size:
        children.append((number + bit + root) % size)
        bit <<= 1
    return parent, children


def tree_reduce(flat: torch.Tensor, op: Any, root: int, end: Endpoint) -> None:
    """Reduce into the root's flat tensor; the others' stay as they are."""
    parent, children = parent_and_children(end.place, root, end.size)
    total = flat.clone() if parent is not None and children else flat
    part = torch.empty_like(flat) if children else flat
    for child in children:
        Receiving(end, part, child, COLLECTIVE_TAG, headed=False).wait()
        combination(op)(total, part)
    if parent is None:
        divide(total, op, end.size)
    else:
        Sending(end, total, parent, COLLECTIVE_TAG, headed=False).wait()


def tree_broadcast(flat: torch.Tensor, root: int, end: Endpoint) -> None:
    """Copy the root's flat tensor into those of all others, the largest subtree first."""
    parent, children = parent_and_children(end.place, root, end.size)
    if parent is not None:
        Receiving(end, flat, parent, COLLECTIVE_TAG, headed=False).wait()
    for work in [Sending(end, flat, child, COLLECTIVE_TAG, headed=False) for child in reversed(children)]:
        work.wait()


def tree_all_reduce(flat: torch.Tensor, op: Any, end: Endpoint) -> None:
    """Reduce to the group's first rank up the tree, then broadcast down it."""
    tree_reduce(flat, op, 0, end)
    tree_broadcast(flat, 0, end)
