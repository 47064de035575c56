"""Which rank takes which sample: exact coverage, one order whatever the number of ranks, resumable at any sample.

An epoch has one global order, drawn from (seed, epoch) alone. The ranks divide it; none of it is padded or repeated, so
where sizes don't divide some ranks take one sample more, and evaluation counts every sample once. (PyTorch's
`torch.utils.data.DistributedSampler` repeats samples to make the shares equal, or drops some.)
"""

import operator
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from labkit.data.errors import DataError


class _EpochOrder:
    """The order of one epoch, and how far it has been handed out: what both samplers share."""

    def __init__(
        self,
        dataset: int | Sized,
        num_replicas: int | None,
        rank: int | None,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        self.length = len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)
        if self.length < 0:
            raise DataError(f"A sampler needs a number of samples of at least 0, not {self.length}.")
        self.num_replicas, self.rank = replica(num_replicas, rank)
        if seed < 0:
            raise DataError(f"The seed of a sampler must be at least 0, not {seed}.")
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.position = 0  # samples of the global order that all ranks together have been handed
        self._start = 0  # where the next pass starts

    def set_epoch(self, epoch: int) -> None:
        """Take the order of `epoch` (from 0). Called with the epoch of a loaded state, it leaves the position there."""
        if epoch < 0:
            raise DataError(f"The epoch of a sampler must be at least 0, not {epoch}.")
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = self._start = 0

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """What resuming needs, the same on every rank and for any number of ranks.

        `position` is the number of samples of the epoch that all ranks together have used. Left out, it is what this
        sampler has handed out; give it where the loader's workers fetch ahead of the training step.
        """
        return {
            "epoch": self.epoch,
            "position": self.position if position is None else position,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, perhaps with another number of ranks or another batch size.

        The next pass starts there; later ones start at the beginning. Raises `DataError` for another set or order.
        """
        for name in ("length", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"The sampler can't resume: {name} is {getattr(self, name)}, but was {state[name]} when the state "
                    "was saved, so the order of samples would be another."
                )
        if not 0 <= state["position"] <= self.length:
            raise DataError(f"The sampler can't resume at sample {state['position']} of {self.length}.")
        self.epoch = state["epoch"]
        self.position = self._start = state["position"]

    def global_order(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """The order of the current epoch, int64 [length], the same on every rank."""
        if not self.shuffle:
            return np.arange(self.length)
        # a pair, not a sum: epoch 1 of seed 0 is not epoch 0 of seed 1
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.length)

    def _begin(self) -> int:
        start, self._start = self._start, 0
        self.position = start
        return start


class DistributedSampler(_EpochOrder, Sampler[int]):
    """Rank r takes the samples r, r + N, r + 2N, ... of the epoch's global order, none twice and none left out.

    The arguments are those of `torch.utils.data.DistributedSampler`; `dataset` may be just its length. Without
    `num_replicas` and `rank` they are the process group's, else 1 and 0. `drop_last` gives every rank the same number,
    and leaves out the fewer than N samples at the end of the order.
    """

    def __init__(
        self,
        dataset: int | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)

    def __iter__(self) -> Iterator[int]:
        start = self._begin()
        return self._indices(start)

    def _indices(self, start: int) -> Iterator[int]:
        order, n = self.global_order(), self.num_replicas
        for index in order[start + self.rank : self._stop(start) : n]:
            self.position = min(self.position + n, self.length)  # the other ranks are taken to be as far
            yield int(index)
        self.position = self.length

    def __len__(self) -> int:
        """How many samples the next pass gives this rank."""
        return max(0, -(-(self._stop(self._start) - self._start - self.rank) // self.num_replicas))

    def _stop(self, start: int) -> int:
        return self.length - (self.length - start) % self.num_replicas if self.drop_last else self.length


class GlobalBatches(_EpochOrder, Sampler[list[int]]):
    """The global batches of an epoch, of each this rank's share: one list of indices a step, for `batch_sampler=`.

    Step k takes the positions [k * batch_size, (k + 1) * batch_size) of the epoch's global order, whatever the number
    of ranks, so a run at any number of ranks trains on the same global batches. Of each batch a rank takes one
    contiguous share; shares differ by at most one sample, the first ranks take the longer ones (the rule of
    `torch.tensor_split`), and a rank's share is empty where the batch has fewer samples than there are ranks.
    `collate_fn` must then accept an empty list. Every rank has the same number of steps. `batch_size` is the global
    one; `drop_last` leaves out a last, shorter batch.
    """

    def __init__(
        self,
        dataset: int | Sized,
        *,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        if batch_size < 1:
            raise DataError(f"The global batch size must be at least 1, not {batch_size}.")
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        start = self._begin()
        return self._batches(start)

    def _batches(self, start: int) -> Iterator[list[int]]:
        order = self.global_order()
        for first in range(start, self._stop(start), self.batch_size):
            batch = order[first : first + self.batch_size]
            self.position = first + len(batch)
            share, longer = divmod(len(batch), self.num_replicas)
            mine = self.rank * share + min(self.rank, longer)
            yield batch[mine : mine + share + (self.rank < longer)].tolist()
        self.position = self.length

    def __len__(self) -> int:
        """How many steps the next pass has, on every rank."""
        return -(-(self._stop(self._start) - self._start) // self.batch_size)

    def _stop(self, start: int) -> int:
        return self.length - (self.length - start) % self.batch_size if self.drop_last else self.length


def replica(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and this one's number: as given, else those of the process group, else 1 and 0; checked."""
    initialised = dist.is_available() and dist.is_initialized()
    if num_replicas is None:
        num_replicas = dist.get_world_size() if initialised else 1
    if rank is None:
        rank = dist.get_rank() if initialised else 0
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise DataError(f"There is no rank {rank} among {num_replicas}: ranks are numbered from 0 to num_replicas - 1.")
    return num_replicas, rank
