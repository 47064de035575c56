"""`labkit bench checkpoint`: a training step with every block checkpointed, by us and by PyTorch, in one process.

Both train copies of the same model on the same batch, turn about. PyTorch's is `torch.utils.checkpoint.checkpoint` with
use_reentrant=False around the same blocks. Ours leaves BatchNorm's statistics alone in the recomputation, which costs a
hook on each module; PyTorch's updates them twice.
"""

import statistics
from functools import partial

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from labkit.bench.ddp_bench import Workload, image_workload, text_workload
from labkit.bench.side_by_side import STEPS, WARM_UPS, Action, Comparison, take_turns
from labkit.memory import checkpoint, checkpoint_blocks
from labkit.memory.checkpoint_policies import blocks_of

TARGET = 1.0


def ours(model: nn.Module, *, use_reentrant: bool = False) -> nn.Module:
    """Every block a checkpoint of ours."""
    return checkpoint_blocks(model, 1, use_reentrant=use_reentrant)


def theirs(model: nn.Module, *, use_reentrant: bool = False) -> nn.Module:
    """Every block a checkpoint of PyTorch's."""
    for block in blocks_of(model):
        forward = partial(type(block).forward, block)
        block.forward = partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=use_reentrant)
    return model


def selective(model: nn.Module) -> nn.Module:
    """Every block a checkpoint of ours that keeps products and convolutions."""
    return checkpoint_blocks(model, "selective")


def plain(model: nn.Module) -> nn.Module:
    return model


def step_of(workload: Workload, wrap: partial[nn.Module]) -> Action:
    """A training step: zero_grad, forward, backward, SGD."""
    torch.manual_seed(0)
    module, inputs, targets = workload()
    module = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    return step


def small_step(call: partial[torch.Tensor]) -> Action:
    """Forward and backward of eight checkpoints that have hardly anything to compute: their overhead."""
    x = torch.ones(8, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(8):
            y = call(torch.sin, y)
        y.sum().backward()

    return step


def bench_checkpoint(*, steps: int = STEPS, warm_ups: int = WARM_UPS) -> dict[str, float]:
    """Print a line for each comparison; returns the median ratios by name. About a minute on 2 cores."""
    print("checkpoint: one process; a step is zero_grad, forward, backward and SGD, every block a checkpoint")
    results: dict[str, float] = {}
    workloads: dict[str, Workload] = {"resnet18": image_workload, "transformer": text_workload}
    for name, workload in workloads.items():
        actions = [step_of(workload, partial(wrap)) for wrap in (ours, theirs, theirs)]
        found = Comparison.of([take_turns(actions, steps=steps, warm_ups=warm_ups)])
        print(found.line(f"checkpoint {name}", target=TARGET))
        results[name], results[f"{name} control"] = found.ratio.median, found.noise.median
    for name, workload in workloads.items():
        wraps = [partial(ours, use_reentrant=True), *[partial(theirs, use_reentrant=True)] * 2]
        found = Comparison.of([take_turns([step_of(workload, wrap) for wrap in wraps], steps=steps, warm_ups=warm_ups)])
        print(found.line(f"checkpoint {name}, as autograd functions"))
        results[f"{name} reentrant"] = found.ratio.median
    theirs_call = torch.utils.checkpoint.checkpoint
    calls = [small_step(partial(call, use_reentrant=False)) for call in (checkpoint, theirs_call, theirs_call)]
    found = Comparison.of([take_turns(calls, steps=10 * steps, warm_ups=warm_ups)])
    print(found.line("checkpoint, eight with nothing to compute"))
    results["overhead"] = found.ratio.median
    for name, workload in workloads.items():
        actions = [step_of(workload, partial(wrap)) for wrap in (plain, ours, selective)]
        times = take_turns(actions, steps=max(4, steps // 3), warm_ups=2)
        without, every, some = (statistics.median(one) for one in times)
        print(
            f"checkpoint {name}: {1e3 * without:.1f} ms without, {every / without:.2f} times as long with every block "
            f"checkpointed, {some / without:.2f} times with products and convolutions kept"
        )
        results[f"{name} over none"], results[f"{name} selective over none"] = every / without, some / without
    return results
