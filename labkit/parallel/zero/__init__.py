"""ZeRO: what data parallel holds on every rank, held once. Stages 1 and 2 shard what steps need, stage 3 all."""

from labkit.parallel.zero.collecting import full_grads as full_grads
from labkit.parallel.zero.collecting import full_params as full_params
from labkit.parallel.zero.collecting import full_state as full_state
from labkit.parallel.zero.formulas import FLOAT32 as FLOAT32
from labkit.parallel.zero.formulas import MIXED as MIXED
from labkit.parallel.zero.formulas import peak_of_step as peak_of_step
from labkit.parallel.zero.formulas import sent_per_step as sent_per_step
from labkit.parallel.zero.formulas import state_per_rank as state_per_rank
from labkit.parallel.zero.offload import offload_optimizer_state as offload_optimizer_state
from labkit.parallel.zero.optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
from labkit.parallel.zero.sharding import fully_shard as fully_shard
from labkit.parallel.zero.watching import watch as watch
