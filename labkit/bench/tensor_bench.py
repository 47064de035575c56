"""`labkit bench tensor`: a shared transformer block, and the loss of sliced logits, beside PyTorch's, on 2 ranks.

Both share copies of the same block by the same layers (columns: query, key, value, up; rows: out, down) in the same
processes. Checks of messages are switched off. A step is forward and backward; the optimizer is the same for both.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.bench.side_by_side import STEPS, WARM_UPS, Action, Comparison, take_turns
from labkit.mesh import init_device_mesh
from labkit.models.encoder import Block
from labkit.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from labkit.parallel.tensor import AttentionParallel
from labkit.ranks import Ranks

TARGET = 0.8
WIDTHS = (256, 512, 1024, 2048)
BATCH, LENGTH = 2, 16  # sequences and tokens of a step
LOSSES = ((512, 4096), (512, 32768))  # targets, classes


def our_block(block: nn.Module) -> nn.Module:
    """The block shared out by labkit."""
    plan = {
        "attention": AttentionParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    return parallelize_module(block, None, plan)


def their_block(block: nn.Module) -> nn.Module:
    """The block shared out by PyTorch, with the plan of its documentation."""
    from torch.distributed.tensor import parallel as torchs

    plan: dict[str, Any] = {f"attention.{name}": torchs.ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {"attention.out": torchs.RowwiseParallel()}
    plan |= {"feed_forward.up": torchs.ColwiseParallel(), "feed_forward.down": torchs.RowwiseParallel()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return torchs.parallelize_module(block, mesh, plan)


def block_step(width: int, share: Callable[[nn.Module], nn.Module]) -> Action:
    """Forward and backward of a block."""
    torch.manual_seed(0)
    block = share(Block(width, width // 64, 4 * width, False, 0.0))
    inputs = torch.randn(BATCH, LENGTH, width, requires_grad=True)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)

    def step() -> None:
        block.zero_grad()
        inputs.grad = None
        block(inputs, valid).sum().backward()

    return step


def block_turns(width: int, steps: int, warm_ups: int) -> list[list[float]]:
    """On each rank: ours, PyTorch's, and PyTorch's once more."""
    actions = [block_step(width, share) for share in (our_block, their_block, their_block)]
    return take_turns(actions, steps=steps, warm_ups=warm_ups)


def loss_step(targets: int, classes: int, *, ours: bool) -> Action:
    """Loss and gradient of this rank's logits."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel as torchs_loss_parallel

    torch.manual_seed(dist.get_rank())
    logits: Any = torch.randn(targets, classes // dist.get_world_size())
    torch.manual_seed(0)
    wanted = torch.randint(classes, (targets,))
    context: Any = loss_parallel if ours else torchs_loss_parallel
    if not ours:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        logits = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False)
    logits = logits.detach().requires_grad_()

    def step() -> None:
        logits.grad = None
        with context():
            F.cross_entropy(logits, wanted).backward()

    return step


def loss_turns(targets: int, classes: int, steps: int, warm_ups: int) -> list[list[float]]:
    """On each rank: ours, PyTorch's, and PyTorch's once more."""
    actions = [loss_step(targets, classes, ours=ours) for ours in (True, False, False)]
    return take_turns(actions, steps=steps, warm_ups=warm_ups)


def bench_tensor(*, steps: int = STEPS, warm_ups: int = WARM_UPS) -> dict[str, float]:
    """Print a line for each width and each loss; returns the median ratios by name. About a minute on 2 cores."""
    print(
        f"tensor: 2 ranks of 1 thread, checks of messages off; {BATCH} x {LENGTH} tokens; a step is forward and "
        "backward"
    )
    results: dict[str, float] = {}
    with Ranks(2, check=False) as ranks:
        for width in WIDTHS:
            found = Comparison.of(ranks.run(block_turns, width, steps, warm_ups))
            print(found.line(f"tensor block of width {width}", target=TARGET))
            results[f"block {width}"] = found.ratio.median
            results[f"block {width} control"] = found.noise.median
        for targets, classes in LOSSES:
            found = Comparison.of(ranks.run(loss_turns, targets, classes, steps, warm_ups))
            print(found.line(f"tensor loss of {targets} targets in {classes} classes", target=TARGET))
            results[f"loss {classes}"] = found.ratio.median
            results[f"loss {classes} control"] = found.noise.median
    return results
