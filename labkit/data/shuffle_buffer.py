"""Shuffling what is too large to shuffle: a buffer of fixed size, from which each next sample is drawn at random.

The buffer holds positions, not samples, so that the order can be run ahead to any point without reading data.
"""

from collections.abc import Iterator

import numpy as np

_DRAWS = 4096  # random numbers drawn at once; part of the order, as other pieces would give other numbers


class ShuffleBuffer:
    """An order of the positions 0 ... count - 1, each once, in which a position comes out at most `size` - 1 early.

    `slots` are the positions in the buffer, `entered` the first that has not entered it yet. With `size` 1 the order is
    0, 1, 2, ...; with `size` at least `count` it is uniform.
    """

    def __init__(self, count: int, size: int, rng: np.random.Generator) -> None:
        self.slots = list(range(min(size, count)))
        self.entered = len(self.slots)
        self._count, self._rng = count, rng
        self._draws: Iterator[int] = iter(())
        self._draining = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.entered < self._count:
            slot = self._draw()
            position, self.slots[slot] = self.slots[slot], self.entered
            self.entered += 1
            return position
        if not self._draining:
            self._rng.shuffle(self.slots)
            self._draining = True
        if not self.slots:
            raise StopIteration
        return self.slots.pop()

    def _draw(self) -> int:
        for slot in self._draws:
            return slot
        self._draws = iter(self._rng.integers(len(self.slots), size=_DRAWS).tolist())
        return next(self._draws)
