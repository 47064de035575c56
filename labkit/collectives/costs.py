"""The alpha-beta model of collectives: when each message would leave and arrive, and so how long a call takes.

A message of n bytes leaves a rank for n beta seconds, after what the rank sent before, and arrives alpha later
(R. Hockney, The communication challenge for MPP, Parallel Computing 20 (1994), equation 1). What a rank does is a list
of actions; the model plays the lists of all ranks against each other, pieces and all.
"""

import math
from collections import deque
from dataclasses import dataclass

from labkit.collectives.circulation import PIECE_BYTES
from labkit.collectives.formulas import chunk_lengths
from labkit.collectives.tree import parent_and_children


@dataclass(frozen=True)
class Action:
    """ "send" starts a message to `peer`, "recv" waits for the next one from it and adds it up if `adds`, "drain" waits
    until all that was sent has left."""

    what: str
    peer: int = -1
    bytes: int = 0
    adds: bool = False


def all_reduce_actions(algorithm: str, nbytes: int, size: int, *, piece_bytes: int = PIECE_BYTES) -> list[list[Action]]:
    """The actions of every rank in an all-reduce of `nbytes` bytes over `size` ranks."""
    build = {"naive": _naive, "tree": _tree, "ring": _ring, "halving_doubling": _halving_doubling}
    if algorithm not in build:
        raise ValueError(f"there is no model of {algorithm!r}; give one of {', '.join(sorted(build))}")
    if size == 1:
        return [[]]
    return [build[algorithm](nbytes, size, place, piece_bytes) for place in range(size)]


def play(actions: list[list[Action]], *, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Seconds until every rank is through, all starting at once.

    `alpha` seconds of latency a message, `beta` seconds a byte on the wire, `gamma` seconds a byte added up.
    """
    size = len(actions)
    clock, free, next_action = [0.0] * size, [0.0] * size, [0] * size
    arriving: dict[tuple[int, int], deque[float]] = {}
    moved = True
    while moved:
        moved = False
        for rank in range(size):
            while next_action[rank] < len(actions[rank]):
                action = actions[rank][next_action[rank]]
                if action.what == "send":
                    free[rank] = max(clock[rank], free[rank]) + action.bytes * beta
                    arriving.setdefault((rank, action.peer), deque()).append(free[rank] + alpha)
                elif action.what == "drain":
                    clock[rank] = max(clock[rank], free[rank])
                else:
                    queue = arriving.get((action.peer, rank))
                    if not queue:
                        break
                    clock[rank] = max(clock[rank], queue.popleft()) + action.adds * action.bytes * gamma
                next_action[rank] += 1
                moved = True
    stuck = [rank for rank in range(size) if next_action[rank] < len(actions[rank])]
    if stuck:
        raise ValueError(f"these actions deadlock: ranks {stuck} wait for messages that nobody sends")
    return max(clock)


def all_reduce_seconds(
    algorithm: str,
    nbytes: int,
    size: int,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    piece_bytes: int = PIECE_BYTES,
) -> float:
    """What the model predicts for an all-reduce of `nbytes` bytes over `size` ranks."""
    return play(
        all_reduce_actions(algorithm, nbytes, size, piece_bytes=piece_bytes), alpha=alpha, beta=beta, gamma=gamma
    )


def _naive(nbytes: int, size: int, place: int, _: int) -> list[Action]:
    if place:
        return [Action("send", 0, nbytes), Action("drain"), Action("recv", 0, nbytes)]
    others = range(1, size)
    return [
        *(Action("recv", other, nbytes, adds=True) for other in others),
        *(Action("send", other, nbytes) for other in others),
        Action("drain"),
    ]


def _tree(nbytes: int, size: int, place: int, _: int) -> list[Action]:
    parent, children = parent_and_children(place, 0, size)
    actions = [Action("recv", child, nbytes, adds=True) for child in children]
    if parent is not None:
        actions += [Action("send", parent, nbytes), Action("drain"), Action("recv", parent, nbytes)]
    return [*actions, *(Action("send", child, nbytes) for child in reversed(children)), Action("drain")]


def _ring(nbytes: int, size: int, place: int, piece_bytes: int) -> list[Action]:
    after, before = (place + 1) % size, (place - 1) % size
    if size == 2 and len(_pieces(chunk_lengths(nbytes, 2)[0], piece_bytes)) == 1:
        whole = _pieces(nbytes, piece_bytes)
        sends = [Action("send", after, piece) for piece in whole]
        return [*sends, *(Action("recv", after, piece, adds=True) for piece in whole), Action("drain")]
    cut = [_pieces(length, piece_bytes) for length in chunk_lengths(nbytes, size)]
    steps = 2 * (size - 1)
    outgoing = [cut[(place - 1 - step) % size] for step in range(size - 1)]
    outgoing += [cut[(place - step) % size] for step in range(size - 1)]
    incoming = [cut[(place - 2 - step) % size] for step in range(size - 1)]
    incoming += [cut[(place - 1 - step) % size] for step in range(size - 1)]
    actions = [Action("send", after, piece) for piece in outgoing[0]]
    for step in range(steps):
        for index, piece in enumerate(incoming[step]):
            actions.append(Action("recv", before, piece, adds=step < size - 1))
            if step + 1 < steps:
                actions.append(Action("send", after, outgoing[step + 1][index]))
    return [*actions, Action("drain")]


def _pieces(nbytes: int, piece_bytes: int) -> list[int]:
    whole = [piece_bytes] * (nbytes // piece_bytes)
    rest = nbytes - sum(whole)
    return whole + ([rest] if rest or not whole else [])


def _halving_doubling(nbytes: int, size: int, place: int, _: int) -> list[Action]:
    power = 1 << (size.bit_length() - 1)
    folded = size - power
    if place < 2 * folded and place % 2 == 0:
        return [Action("send", place + 1, nbytes), Action("drain"), Action("recv", place + 1, nbytes)]
    actions = [Action("recv", place - 1, nbytes, adds=True)] if place < 2 * folded else []
    number = place // 2 if place < 2 * folded else place - folded

    def place_of(other: int) -> int:
        return 2 * other + 1 if other < folded else other + folded

    held, back = nbytes, []
    for level in range(int(math.log2(power))):
        distance = power >> (level + 1)
        lower, upper = chunk_lengths(held, 2)
        kept, given = (upper, lower) if number & distance else (lower, upper)
        partner = place_of(number ^ distance)
        actions += [Action("send", partner, given), Action("recv", partner, kept, adds=True), Action("drain")]
        back.append((partner, kept, given))
        held = kept
    for partner, kept, given in reversed(back):
        actions += [Action("send", partner, kept), Action("recv", partner, given), Action("drain")]
    if place < 2 * folded:
        actions += [Action("send", place - 1, nbytes), Action("drain")]
    return actions
