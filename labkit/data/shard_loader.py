"""PyTorch's DataLoader for a `ShardStream`, which keeps the stream's state right while workers fetch ahead."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from labkit.data.errors import DataError
from labkit.data.shards import Sample
from labkit.data.stream import ShardStream


class ShardLoader(DataLoader[Any]):
    """Batches of a stream, from `num_workers` processes (0: none). `batch_size` is this rank's; None: single samples.

    `state_dict` is right after every batch that was handed out, whatever the workers have fetched ahead: resuming gives
    exactly the batches that were still to come. Each worker ends with a shorter batch where sizes don't divide, so
    ranks may differ by one batch a worker.
    """

    def __init__(
        self,
        stream: ShardStream,
        *,
        batch_size: int | None = 1,
        num_workers: int = 0,
        collate_fn: Callable[[list[Sample]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        prefetch_factor: int | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise DataError(f"The batch size must be at least 1, not {batch_size}.")
        super().__init__(
            stream,
            batch_size=batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            prefetch_factor=prefetch_factor,
        )
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()  # starts the workers, with the stream as it stands
        if self.num_workers:
            self.stream.begin(self.num_workers)
        return self._counted(batches)

    def __len__(self) -> int:
        """How many batches the next pass has on this rank."""
        size = self.batch_size or 1
        return sum(-(-count // size) for count in self.stream.next_pass(max(1, self.num_workers)))

    def state_dict(self) -> dict[str, Any]:
        """The stream's, after the last batch that was handed out."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch at which `state` was taken. Raises `DataError`, as the stream does."""
        self.stream.load_state_dict(state)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if self.num_workers:
                self.stream.advance(self.batch_size or 1)
            yield batch
