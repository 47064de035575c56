"""`labkit bench pipeline`: a step of our pipeline beside one of PyTorch's, on 2 ranks with 8 micro-batches.

Both run copies of the same stages in the same processes on the same batch. Checks of messages are switched off. How
near the simulator comes to the runtime is measured with stages that sleep for their cost, on an emulated network,
where ranks don't compete for the cores: there is nothing of PyTorch's to compare with, its messages are not delayed.
"""

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

from labkit.bench.side_by_side import STEPS, WARM_UPS, Action, Comparison, slowest, take_turns
from labkit.collectives import Network
from labkit.models import transformer
from labkit.parallel.pipeline import (
    KNOWN,
    Costs,
    Link,
    PipelineSchedule,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    simulate,
    split_model,
)
from labkit.parallel.pipeline.sleeping import SleepingStage
from labkit.ranks import Ranks

TARGET = 0.9
MICRO_BATCHES = 8
NETWORK = Network(latency_us=2000, bandwidth_gbit_s=0.1)
COST = 0.012  # seconds that a sleeping stage's forward takes; each part of its backward takes as long
PASSED_ON = 4096  # float32 numbers that a sleeping stage passes on
Workload = Callable[[], tuple[nn.Module, Tensor, Tensor]]

OURS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
THEIRS = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


def small_activations() -> tuple[nn.Module, Tensor, Tensor]:
    """A transformer of 2 layers of width 64: 4 sequences of 16 tokens a micro-batch, 16 kB between the stages."""
    model = transformer(vocab_size=100, d_model=64, num_layers=2, num_heads=2, max_len=16, num_classes=10)
    return model, torch.randint(1, 100, (4 * MICRO_BATCHES, 16)), torch.randint(10, (4 * MICRO_BATCHES,))


def large_activations() -> tuple[nn.Module, Tensor, Tensor]:
    """Four convolutions of 32 channels on 8 images of 64 x 64 a micro-batch: 4 MB between the stages."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, torch.randn(8 * MICRO_BATCHES, 3, 64, 64), torch.randint(10, (8 * MICRO_BATCHES,))


WORKLOADS: dict[str, tuple[Workload, list[int] | None]] = {
    "small activations": (small_activations, [2]),
    "large activations": (large_activations, [4]),
}


def step_of(workload: Workload, cuts: list[int] | None, name: str, *, ours: bool) -> Action:
    """A training step of this rank's stage: zero_grad, the schedule's step, SGD."""
    torch.manual_seed(0)
    model, inputs, targets = workload()
    rank, size = dist.get_rank(), dist.get_world_size()
    module = copy.deepcopy(split_model(model, size, cuts=cuts).module(rank))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    stage_class: Any = PipelineStage if ours else pipelining.PipelineStage
    stage = stage_class(module, rank, size, torch.device("cpu"))
    schedule: Any = (OURS if ours else THEIRS)[name](stage, MICRO_BATCHES, F.cross_entropy)
    arguments: tuple[Any, ...] = (inputs,) if rank == 0 else ()
    keywords: dict[str, Any] = {"target": targets} if rank == size - 1 else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*arguments, **keywords, return_outputs=False)
        optimizer.step()

    return step


def turns(workload: Workload, cuts: list[int] | None, name: str, steps: int, warm_ups: int) -> list[list[float]]:
    """On each rank: ours, PyTorch's, and PyTorch's once more."""
    actions = [step_of(workload, cuts, name, ours=ours) for ours in (True, False, False)]
    return take_turns(actions, steps=steps, warm_ups=warm_ups)


def turns_of_sleepers(names: list[str], cost: float, steps: int) -> list[list[float]]:
    """Steps of sleeping stages under each schedule."""
    rank, size, actions = dist.get_rank(), dist.get_world_size(), []
    for name in names:
        chunks = 2 if name == "interleaved" else 1
        mine = range(rank, chunks * size, size)
        stages = [
            PipelineStage(SleepingStage(cost / chunks, cost / chunks, cost / chunks), index, chunks * size, "cpu")
            for index in mine
        ]
        schedule = PipelineSchedule(stages, KNOWN[name], MICRO_BATCHES, lambda output, target: output.mean())
        batch = torch.ones(MICRO_BATCHES, PASSED_ON)
        actions.append(lambda schedule=schedule, batch=batch: schedule.step(batch, target=batch, return_outputs=False))
    return take_turns(actions, steps=steps, warm_ups=1)


def predicted(name: str, ranks: int, cost: float = COST) -> float:
    """What the simulator says of a step of the sleeping stages."""
    cost = cost / (2 if name == "interleaved" else 1)
    costs = Costs(cost, 2 * cost, cost, cost)
    return float(simulate(KNOWN[name](ranks, MICRO_BATCHES), costs, Link.of(NETWORK, 4 * PASSED_ON)).total)


def bench_pipeline(*, steps: int = STEPS, warm_ups: int = WARM_UPS, cost: float = COST) -> dict[str, float]:
    """Print a line for each comparison; returns the median ratios by name. About a minute on 2 cores."""
    print(
        f"pipeline: 2 ranks of 1 thread, {MICRO_BATCHES} micro-batches, checks of messages off; a step trains with SGD"
    )
    results: dict[str, float] = {}
    with Ranks(2, check=False) as ranks:
        for what, (workload, cuts) in WORKLOADS.items():
            for name in OURS:
                found = Comparison.of(ranks.run(turns, workload, cuts, name, steps, warm_ups))
                print(found.line(f"pipeline {name}, {what}", target=TARGET))
                results[f"{name}, {what}"] = found.ratio.median
                results[f"{name}, {what}, control"] = found.noise.median
    with Ranks(4, network=NETWORK) as ranks:
        names = list(KNOWN)
        times = slowest(ranks.run(turns_of_sleepers, names, cost, max(2, steps // 10)))
    for name, seconds in zip(names, times, strict=True):
        found_seconds, told = statistics.median(seconds), predicted(name, 4, cost)
        print(
            f"pipeline {name}, 4 ranks whose stages sleep for their cost, emulated network ({NETWORK}): "
            f"{1e3 * found_seconds:.0f} ms, simulated {1e3 * told:.0f} ms, {100 * (found_seconds / told - 1):+.0f} %"
        )
        results[f"{name}, asleep"] = found_seconds / told
    return results
