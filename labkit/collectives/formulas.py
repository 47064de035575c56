"""What a collective sends, by formula: payload bytes and messages of every rank.

Written from the algorithms' definitions, apart from the code that runs them, so that the two can be held against each
other. `sizes` of chunks differ by at most one element where N does not divide K, the longer ones first.
"""

import math
from dataclasses import dataclass

from labkit.collectives.tree import parent_and_children


@dataclass(frozen=True)
class Sent:
    """Payload bytes and messages that each rank of a group sends, in group order."""

    bytes: list[int]
    messages: list[int]

    @property
    def busiest(self) -> int:
        """Bytes that the busiest rank sends."""
        return max(self.bytes)

    @property
    def total(self) -> int:
        """Bytes that all ranks send together."""
        return sum(self.bytes)


def chunk_lengths(elements: int, count: int) -> list[int]:
    """Lengths of `count` chunks of `elements`: they differ by at most one, the longer ones first."""
    small, longer = divmod(elements, count)
    return [small + (index < longer) for index in range(count)]


def all_reduce_sent(algorithm: str, elements: int, itemsize: int, size: int, *, piece_bytes: int = 1 << 21) -> Sent:
    """What an all-reduce of `elements` elements of `itemsize` bytes over `size` ranks sends.

    "naive": the first rank (N - 1) K, each other K.
    "ring": 2 K (N - 1) / N elements where N divides K, in 2 (N - 1) messages times the pieces of a chunk; two ranks
    exchange their whole tensors where a chunk is one piece.
    "tree": K up, and K down to each child.
    "halving_doubling": the ring's bytes in 2 log2 N messages where N is a power of two; elsewhere K once more in each
    of the folded pairs, both ways.
    """
    if size == 1:
        return Sent([0], [0])
    if algorithm == "naive":
        count = [size - 1] + [1] * (size - 1)
    elif algorithm == "tree":
        count = [(place > 0) + len(parent_and_children(place, 0, size)[1]) for place in range(size)]
    elif algorithm == "ring":
        return _ring(elements, itemsize, size, piece_bytes)
    elif algorithm == "halving_doubling":
        return _halving_doubling(elements, itemsize, size)
    else:
        raise ValueError(f"there is no formula for {algorithm!r}; give naive, tree, ring or halving_doubling")
    return Sent([times * elements * itemsize for times in count], count)


def _ring(elements: int, itemsize: int, size: int, piece_bytes: int) -> Sent:
    longest = max(1, piece_bytes // itemsize)
    lengths = chunk_lengths(elements, size)
    cut = [max(1, math.ceil(length / longest)) for length in lengths]
    if size == 2 and cut[0] == 1:  # both phases fold into one exchange of the whole tensor
        return Sent([itemsize * elements] * 2, [max(1, math.ceil(elements / longest))] * 2)

    # reduce-scatter passes on every chunk but a rank's own, all-gather every chunk but its successor's
    def passed_on(values: list[int]) -> list[int]:
        return [2 * sum(values) - values[place] - values[(place + 1) % size] for place in range(size)]

    return Sent([itemsize * count for count in passed_on(lengths)], passed_on(cut))


def _halving_doubling(elements: int, itemsize: int, size: int) -> Sent:
    power = 1 << (size.bit_length() - 1)
    folded = size - power
    sent, messages = [], []
    for place in range(size):
        if place < 2 * folded and place % 2 == 0:
            sent.append(elements)
            messages.append(1)
            continue
        number = place // 2 if place < 2 * folded else place - folded
        held, total, distance = elements, 0, power // 2
        while distance:
            lower, upper = chunk_lengths(held, 2)
            total += held  # the half that is given away, and later the half that was kept
            held, distance = upper if number & distance else lower, distance // 2
        back = place < 2 * folded
        sent.append(total + back * elements)
        messages.append(2 * (power.bit_length() - 1) + back)
    return Sent([itemsize * count for count in sent], messages)
