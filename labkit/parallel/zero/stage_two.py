"""Stage 2: gradients are sharded too. A bucket's are freed as soon as they are reduced, in backward; 1/N stays.

Source: S. Rajbhandari and others, ZeRO (SC20), arXiv:1910.02054, section 5.2.
"""

import torch

from labkit.parallel.zero.buckets import ShardedBucket


class FreedGradients(ShardedBucket):
    """A bucket that has room for whole gradients only from its first one until it is reduced.

    Under `no_sync` that is from the first backward to the last, so that accumulating costs stage 1's memory. Without
    it every backward is reduced and added to the shard: the memory of stage 2, and the bytes of as many steps.
    """

    in_flight = 2  # beside the one that fills

    def settle(self, output: torch.Tensor) -> None:
        self.reduced = output if self.reduced is None else self.reduced.add_(output)
        self.flat, self.views = None, []

    def clear(self) -> None:
        super().clear()
        self.flat, self.views = None, []
