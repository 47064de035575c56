"""The ways to share the training of one model among ranks: one technique a file or folder."""

from labkit.parallel.data_parallel import DistributedDataParallel as DistributedDataParallel
from labkit.parallel.pipeline import PipelineSchedule as PipelineSchedule
from labkit.parallel.pipeline import PipelineStage as PipelineStage
from labkit.parallel.pipeline import Schedule1F1B as Schedule1F1B
from labkit.parallel.pipeline import ScheduleGPipe as ScheduleGPipe
from labkit.parallel.pipeline import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
from labkit.parallel.pipeline import split_model as split_model
from labkit.parallel.synchronised_norm import SyncBatchNorm as SyncBatchNorm
from labkit.parallel.tensor import ColwiseParallel as ColwiseParallel
from labkit.parallel.tensor import RowwiseParallel as RowwiseParallel
from labkit.parallel.tensor import SequenceParallel as SequenceParallel
from labkit.parallel.tensor import VocabParallelEmbedding as VocabParallelEmbedding
from labkit.parallel.tensor import loss_parallel as loss_parallel
from labkit.parallel.tensor import parallelize_module as parallelize_module
from labkit.parallel.zero import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
from labkit.parallel.zero import fully_shard as fully_shard
