"""A rank's shares of the global batches, one epoch after the other, and where the run is in its data."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from labkit.data import GlobalBatches
from labkit.record import span
from labkit.train.workloads import Batches


class _Batch(Dataset[tuple[Tensor, Tensor]]):
    """A data set whose index is a whole list of samples: loader workers then prepare whole batches."""

    def __init__(self, data: Batches) -> None:
        self.data = data

    def __getitem__(self, indices: Any) -> tuple[Tensor, Tensor]:
        return self.data.batch(indices)


class EpochBatches:
    """This rank's share of each global batch of an epoch.

    A share may be empty, where a last batch has fewer samples than there are ranks. Then one sample comes that is not
    the rank's, marked by False: it takes part in the step, so that no rank waits for another, but must not count.
    """

    def __init__(
        self, data: Batches, *, batch_size: int, shares: int, share: int, shuffle: bool, seed: int, workers: int = 0
    ) -> None:
        self.data, self.workers = data, workers
        self.sampler = GlobalBatches(
            len(data), batch_size=batch_size, num_replicas=shares, rank=share, shuffle=shuffle, seed=seed
        )
        self.batch_size = batch_size

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Inputs, targets, and whether they count, of epoch `number` from its sample `start` on."""
        self.data.set_epoch(number)
        self.sampler.load_state_dict(self.state(number, start))
        shares = [(share or [0], bool(share)) for share in self.sampler]
        loader: Iterator[tuple[Tensor, Tensor]]
        if self.workers:
            loader = iter(
                DataLoader(
                    _Batch(self.data),
                    sampler=[share for share, _ in shares],
                    batch_size=None,
                    num_workers=self.workers,
                    generator=torch.Generator(),  # else it draws from the global one
                )
            )
        else:
            loader = (self.data.batch(share) for share, _ in shares)
        for _, counts in shares:
            with span("data", "data"):
                inputs, targets = next(loader)
            yield inputs, targets, counts

    def steps_from(self, start: int) -> int:
        """How many global batches an epoch has from its sample `start` on."""
        return -(-(len(self.data) - start) // self.batch_size)

    def state(self, number: int, position: int) -> dict[str, Any]:
        """What a snapshot keeps: the epoch, and how many of its samples all ranks together have used."""
        return {**self.sampler.state_dict(position=position), "epoch": number}
