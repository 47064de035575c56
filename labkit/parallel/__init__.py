"""The ways to share the training of one model among ranks: one technique a file or folder."""

from labkit.parallel.data_parallel import DistributedDataParallel as DistributedDataParallel
from labkit.parallel.synchronised_norm import SyncBatchNorm as SyncBatchNorm
