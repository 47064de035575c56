"""Stage 1: the optimizer's state is sharded. Each rank keeps whole gradients, of which its own part is averaged.

Source: S. Rajbhandari and others, ZeRO (SC20), arXiv:1910.02054, section 5.1. A rank needs the mean only of what it
steps: a reduce-scatter, half of an all-reduce. The other half, the all-gather, brings back the stepped parameters.
"""

import torch

from labkit.parallel.zero.buckets import ShardedBucket


class WholeGradients(ShardedBucket):
    """A bucket whose gradients stay where they are: their room is kept from step to step.

    A second backward before `zero_grad` needs the room again, so the mean so far is set aside: 1/N more memory.
    """

    in_flight = 1 << 30  # its room is there anyway

    def open(self) -> None:
        super().open()
        if self.reduced is not None and self.flat is not None and self._in_place(self.reduced):
            self.reduced = self.reduced.clone()

    def output(self) -> torch.Tensor:
        """In place: of the other parts nothing is needed any more."""
        assert self.flat is not None
        return self.layout.part(self.flat, self.place)

    def settle(self, output: torch.Tensor) -> None:
        self.reduced = output if self.reduced is None else output.add_(self.reduced)

    def _in_place(self, tensor: torch.Tensor) -> bool:
        return self.flat is not None and tensor.untyped_storage()._cdata == self.flat.untyped_storage()._cdata
