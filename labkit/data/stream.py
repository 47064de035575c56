"""Streaming a set that is larger than memory: one shard and a buffer at a time, each sample to one rank and one worker.

An epoch orders the shards by (seed, epoch) and numbers the samples through; the ranks take equal, contiguous ranges of
these numbers, and a rank's loader workers equal parts of its range. So each reads only its own shards (the first and
the last perhaps in part), ranks differ by at most one sample, and none is read twice or left out.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from labkit.data.errors import DataError
from labkit.data.sampler import replica
from labkit.data.shards import OpenShard, Sample, read_index, spans
from labkit.data.shuffle_buffer import ShuffleBuffer


@dataclass(frozen=True)
class Progress:
    """How many samples each of a rank's workers has given, and which of them gives the next batch."""

    taken: tuple[int, ...]
    turn: int = 0


class ShardStream(IterableDataset[Sample]):
    """The samples of a set of shards (see `write_shards`) that fall to this rank, in an order shuffled by a buffer.

    Memory: one shard and `buffer_size` samples a worker. The order depends on seed, epoch, number of ranks, rank,
    number of workers and `buffer_size`, on nothing else; without `shuffle` it is the order in which the set was
    written. Without `num_replicas` and `rank` they are the process group's, else 1 and 0. `check` compares each shard
    with its checksum when it is opened.

    `state_dict` is right after every sample when the stream is iterated directly; with a loader use `ShardLoader`,
    which keeps it right with any number of workers.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        buffer_size: int = 1000,
        check: bool = True,
    ) -> None:
        super().__init__()
        self.index = read_index(folder)
        self.num_replicas, self.rank = replica(num_replicas, rank)
        if buffer_size < 1 or seed < 0:
            raise DataError(f"buffer_size must be at least 1 and seed at least 0, not {buffer_size} and {seed}.")
        self.shuffle, self.seed, self.buffer_size, self.check = shuffle, seed, buffer_size, check
        self.epoch = 0
        self.progress = Progress((0,))
        self._start = self.progress

    def set_epoch(self, epoch: int) -> None:
        """Take the order of `epoch` (from 0), before iterating. With the epoch of a loaded state, it stays there."""
        if epoch < 0:
            raise DataError(f"The epoch of a stream must be at least 0, not {epoch}.")
        if epoch != self.epoch:
            self.epoch = epoch
            self.progress = self._start = Progress((0,))

    def __len__(self) -> int:
        """How many samples of the epoch are this rank's."""
        first, stop = self._range(0, 1)
        return stop - first

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        if worker is None:
            self.begin(1)
            return self._counted(self._samples(self._order(0, 1, self.progress.taken[0])))
        start = self._at(worker.num_workers)
        number = (start.turn + worker.id) % worker.num_workers  # the loader asks worker 0 first
        return self._samples(self._order(number, worker.num_workers, start.taken[number]))

    def begin(self, workers: int) -> None:
        """Start a pass with so many workers where the loaded state says, the next one at the beginning again."""
        self.progress, self._start = self._at(workers), Progress((0,))

    def advance(self, batch_size: int) -> None:
        """Count one batch of the current pass, as the loader hands them out: from each worker in turn that has some."""
        taken, turn = list(self.progress.taken), self.progress.turn
        workers = len(taken)
        left = [count - gone for count, gone in zip(self.worker_samples(workers), taken, strict=True)]
        while not left[turn] and any(left):
            turn = (turn + 1) % workers
        taken[turn] += min(batch_size, left[turn])
        self.progress = Progress(tuple(taken), (turn + 1) % workers)

    def worker_samples(self, workers: int) -> list[int]:
        """How many samples of the epoch are each worker's."""
        ranges = [self._range(worker, workers) for worker in range(workers)]
        return [stop - first for first, stop in ranges]

    def next_pass(self, workers: int) -> list[int]:
        """How many samples the next pass will bring from each worker."""
        return [n - taken for n, taken in zip(self.worker_samples(workers), self._at(workers).taken, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on after the last sample (with `ShardLoader`: batch) that it handed out."""
        return self._order_settings() | {
            "epoch": self.epoch,
            "taken": list(self.progress.taken),
            "turn": self.progress.turn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: the next pass has exactly the samples that were still to come, in that order.

        Raises `DataError` where the set, the number of ranks, the rank or the shuffling is another.
        """
        for name, value in self._order_settings().items():
            if state[name] != value:
                raise DataError(
                    f"The stream can't resume: {name} is {value}, but was {state[name]} when the state was saved, so "
                    "the order of samples would be another."
                )
        self.epoch = state["epoch"]
        self.progress = self._start = Progress(tuple(state["taken"]), state["turn"])

    def _order_settings(self) -> dict[str, Any]:
        names = ("num_replicas", "rank", "shuffle", "seed", "buffer_size")
        return {"index": self.index.digest} | {name: getattr(self, name) for name in names}

    def _at(self, workers: int) -> Progress:
        """Where the next pass starts, for so many workers."""
        if not any(self._start.taken):
            return Progress((0,) * workers)
        if len(self._start.taken) != workers:
            raise DataError(
                f"The stream can't resume with {workers} workers: its state was saved with {len(self._start.taken)}, "
                "and the order of samples depends on it."
            )
        return self._start

    def _range(self, worker: int, workers: int) -> tuple[int, int]:
        first, stop = _share(0, self.index.samples, self.rank, self.num_replicas)
        return _share(first, stop, worker, workers)

    def _order(self, worker: int, workers: int, skip: int) -> "_WorkerOrder":
        first, stop = self._range(worker, workers)
        rng = np.random.default_rng((self.seed, self.epoch, self.rank, worker))
        buffer = ShuffleBuffer(stop - first, self.buffer_size if self.shuffle else 1, rng)
        for _ in itertools.islice(buffer, skip):
            pass
        return _WorkerOrder(first, stop, buffer)

    def _counted(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        for sample in samples:
            self.progress = Progress((self.progress.taken[0] + 1,))
            yield sample

    def _samples(self, order: "_WorkerOrder") -> Iterator[Sample]:
        # what is in the buffer now (after a skip: scattered over a few shards), then what enters it later, ascending
        buffer = order.buffer
        read = self._read(itertools.chain(sorted(buffer.slots), range(buffer.entered, order.stop - order.first)), order)
        held: dict[int, Sample] = {}
        for position in buffer:
            while position not in held:
                number, sample = next(read)
                held[number] = sample
            yield held.pop(position)

    def _read(self, positions: Iterator[int], order: "_WorkerOrder") -> Iterator[tuple[int, Sample]]:
        shards = self.index.shards
        if self.shuffle:
            rng = np.random.default_rng((self.seed, self.epoch))  # the same on every rank
            shards = tuple(shards[number] for number in rng.permutation(len(shards)))
        ends = list(itertools.accumulate(shard.samples for shard in shards))
        for number, group in spans(ends, (order.first + position for position in positions)):
            start = ends[number] - shards[number].samples
            shard = OpenShard(self.index, shards[number], check=self.check)
            for position in group:
                yield position - order.first, shard.sample(position - start)
            del shard  # before the next is opened


@dataclass(frozen=True)
class _WorkerOrder:
    first: int  # of the epoch's samples, the range that is one worker's
    stop: int
    buffer: ShuffleBuffer  # the order within it


def _share(first: int, stop: int, number: int, parts: int) -> tuple[int, int]:
    """The range of part `number` of `parts` of [first, stop); sizes differ by at most one."""
    count = stop - first
    return first + count * number // parts, first + count * (number + 1) // parts
