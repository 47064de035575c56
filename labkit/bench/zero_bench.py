"""`labkit bench zero`: a training step with each stage of ZeRO beside PyTorch's own, on 2 ranks.

Stage 1 beside PyTorch's ZeroRedundancyOptimizer under its DistributedDataParallel; stages 2 and 3 beside its
`fully_shard` (FSDP2), which keeps the parameters after forward or frees them. Same models, batches and optimizer in the
same processes; checks of messages are switched off.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchsZeroRedundancyOptimizer

from labkit.bench.ddp_bench import Workload, image_workload, text_workload
from labkit.bench.side_by_side import STEPS, WARM_UPS, Action, Comparison, take_turns
from labkit.collectives import barrier
from labkit.mesh import init_device_mesh
from labkit.parallel import ZeroRedundancyOptimizer, fully_shard
from labkit.ranks import Ranks
from labkit.record import loopback_bytes
from labkit.train.zero import units_of

TARGETS = {1: 0.8, 2: 0.9, 3: 0.9}
RATE = 1e-4
Prepare = Callable[[nn.Module], tuple[nn.Module, Any]]


def ours(module: nn.Module, *, stage: int) -> tuple[nn.Module, Any]:
    """A model of ours with its optimizer."""
    if stage < 3:
        return module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, stage=stage, lr=RATE)
    for block in units_of(module):
        fully_shard(block)
    fully_shard(module)
    return module, torch.optim.AdamW(module.parameters(), lr=RATE)


def theirs(module: nn.Module, *, stage: int) -> tuple[nn.Module, Any]:
    """PyTorch's counterpart."""
    if stage == 1:
        optimizer: Any = TorchsZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=RATE)
        return nn.parallel.DistributedDataParallel(module), optimizer
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)),
        "reshard_after_forward": stage == 3,
    }
    for block in units_of(module):
        torchs_fully_shard(block, **options)
    torchs_fully_shard(module, **options)
    return module, torch.optim.AdamW(module.parameters(), lr=RATE)


def step_of(workload: Workload, prepare: Prepare) -> Action:
    """A training step: zero_grad, forward, backward, AdamW."""
    torch.manual_seed(0)
    module, inputs, targets = workload()
    network, optimizer = prepare(module)

    def step() -> None:
        optimizer.zero_grad()
        output = network(inputs)
        F.cross_entropy(output.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    return step


def turns(workload: Workload, stage: int, steps: int, warm_ups: int) -> list[list[float]]:
    """On each rank: ours, PyTorch's, and PyTorch's once more."""
    prepares: list[Prepare] = [partial(one, stage=stage) for one in (ours, theirs, theirs)]
    return take_turns([step_of(workload, prepare) for prepare in prepares], steps=steps, warm_ups=warm_ups)


def bytes_on_the_wire(workload: Workload, prepare: Prepare, steps: int = 4) -> float:
    """Bytes that a rank sends in a step, as the kernel counts them on the loopback interface; called on all ranks."""
    step = step_of(workload, prepare)
    for _ in range(2):
        step()
    barrier()
    before = loopback_bytes()
    barrier()
    for _ in range(steps):
        step()
    barrier()
    return (loopback_bytes() - before) / steps / dist.get_world_size()


def bench_zero(*, steps: int = STEPS, warm_ups: int = WARM_UPS) -> dict[str, float]:
    """Print a line for each stage and workload; returns the median ratios by name. About two minutes on 2 cores."""
    print("zero: 2 ranks of 1 thread, checks of messages off; a step is zero_grad, forward, backward and AdamW")
    names = {1: "PyTorch's stage 1", 2: "FSDP2 that keeps", 3: "FSDP2"}
    workloads: dict[str, Workload] = {"resnet18": image_workload, "transformer": text_workload}
    results: dict[str, float] = {}
    for name, workload in workloads.items():
        for stage, target in TARGETS.items():
            with Ranks(2, check=False) as ranks:
                found = Comparison.of(ranks.run(turns, workload, stage, steps, warm_ups))
            print(found.line(f"zero stage {stage} {name}", target=target, of_whom=names[stage]))
            results[f"stage {stage} {name}"] = found.ratio.median
            results[f"stage {stage} {name} control"] = found.noise.median
    return results
