"""`labkit bench accumulate`: 4 micro-batches by `accumulate` under our DistributedDataParallel, beside the same
loop written by hand under PyTorch's with its no_sync, on 2 ranks.

Ours agrees on the step's weight by an all-reduce of 16 bytes; the hand-written loop knows it. Checks of messages are
switched off.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.bench.ddp_bench import Workload, image_workload, text_workload
from labkit.bench.side_by_side import STEPS, WARM_UPS, Action, Comparison, take_turns
from labkit.memory import accumulate
from labkit.parallel import DistributedDataParallel
from labkit.ranks import Ranks

PARTS = 4


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The sum of the cross-entropies, and the number of targets."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum"), targets.numel()


def step_of(workload: Workload, *, ours: bool) -> Action:
    """A training step: zero_grad, 4 micro-batches of one sample each, SGD."""
    torch.manual_seed(0)
    module, inputs, targets = workload()
    parts = list(zip(inputs.tensor_split(PARTS), targets.tensor_split(PARTS), strict=True))
    wrapper: Any = (DistributedDataParallel if ours else nn.parallel.DistributedDataParallel)(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def our_step() -> None:
        optimizer.zero_grad()
        accumulate(wrapper, parts, loss)
        optimizer.step()

    def their_step() -> None:
        optimizer.zero_grad()
        for number, (some, wanted) in enumerate(parts):
            with nullcontext() if number == PARTS - 1 else wrapper.no_sync():
                (loss(wrapper(some), wanted)[0] / targets.numel()).backward()
        optimizer.step()

    return our_step if ours else their_step


def turns(workload: Workload, steps: int, warm_ups: int) -> list[list[float]]:
    """On each rank: ours, PyTorch's, and PyTorch's once more."""
    return take_turns([step_of(workload, ours=ours) for ours in (True, False, False)], steps=steps, warm_ups=warm_ups)


def bench_accumulate(*, steps: int = STEPS, warm_ups: int = WARM_UPS) -> dict[str, float]:
    """Print a line for each workload; returns the median ratios by name. About half a minute on 2 cores."""
    print(f"accumulate: 2 ranks of 1 thread, checks of messages off; a step is {PARTS} micro-batches of one sample")
    results: dict[str, float] = {}
    workloads: dict[str, Workload] = {"resnet18": image_workload, "transformer": text_workload}
    with Ranks(2, check=False) as ranks:
        for name, workload in workloads.items():
            found = Comparison.of(ranks.run(turns, workload, steps, warm_ups))
            print(found.line(f"accumulate {name}"))
            results[name], results[f"{name} control"] = found.ratio.median, found.noise.median
    return results
