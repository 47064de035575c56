"""`labkit bench ddp`: a training step under our DistributedDataParallel beside one under PyTorch's, on 2 ranks.

Both wrap copies of the same model in the same processes and train on the same batch, with the wrappers' own defaults.
Checks of messages are switched off. How much of the communication hides behind backward is measured on an emulated
network, where there is nothing of PyTorch's to compare with: its messages are not delayed.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.bench.side_by_side import STEPS, WARM_UPS, Action, Comparison, slowest, take_turns
from labkit.collectives import Network
from labkit.models import resnet, transformer
from labkit.parallel import DistributedDataParallel
from labkit.ranks import Ranks

TARGET = 1.0
# about as long on the wire as backward computes: a faster one has little to hide, a slower one nothing to hide behind
NETWORK = Network(latency_us=100, bandwidth_gbit_s=4)
CAPS_MB = (25, 4)
PARAMETERS = (10, 100, 1000)
Workload = Callable[[], tuple[nn.Module, Tensor, Tensor]]


def image_workload() -> tuple[nn.Module, Tensor, Tensor]:
    """ResNet-18 with BatchNorm, 4 images of 32 x 32 a rank: 11 million parameters in 62 tensors."""
    return resnet(18, num_classes=10), torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


def text_workload() -> tuple[nn.Module, Tensor, Tensor]:
    """A causal transformer of 4 layers, 4 sequences of 64 tokens a rank: 5 million parameters in 51 tensors."""
    model = transformer(vocab_size=8192, d_model=256, num_layers=4, num_heads=4, max_len=64, causal=True, head="token")
    return model, torch.randint(8192, (4, 64)), torch.randint(8192, (4, 64))


class ManySmall(nn.Module):
    """Parameters of 1,024 elements each, and hardly anything to compute."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(1024)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [1024] to a score of two classes [1, 2]."""
        products = torch.stack(list(self.parts)) @ x
        return torch.stack([products.sum(), products.mean()])[None]


def many_small(count: int) -> Workload:
    return lambda: (ManySmall(count), torch.randn(1024), torch.zeros(1, dtype=torch.int64))


def step_of(workload: Workload, wrap: Callable[[nn.Module], nn.Module]) -> Action:
    """A training step: zero_grad, forward, backward, SGD."""
    torch.manual_seed(0)
    module, inputs, targets = workload()
    wrapper: Any = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        output = wrapper(inputs)
        F.cross_entropy(output.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    return step


def turns_beside_torch(workload: Workload, steps: int, warm_ups: int) -> list[list[float]]:
    """On each rank: ours, PyTorch's, and PyTorch's once more."""
    theirs = nn.parallel.DistributedDataParallel
    actions = [step_of(workload, wrap) for wrap in (DistributedDataParallel, theirs, theirs)]
    return take_turns(actions, steps=steps, warm_ups=warm_ups)


def turns_of_overlap(workload: Workload, cap_mb: float, steps: int, warm_ups: int) -> list[list[float]]:
    """On each rank: overlapped, one after the other, and without any communication."""

    def wrap(module: nn.Module, *, overlap: bool = True, sync: bool = True) -> nn.Module:
        wrapper = DistributedDataParallel(module, bucket_cap_mb=cap_mb, overlap=overlap, broadcast_buffers=False)
        wrapper._sync = sync
        return wrapper

    wraps: list[Callable[[nn.Module], nn.Module]] = [wrap, partial(wrap, overlap=False), partial(wrap, sync=False)]
    return take_turns([step_of(workload, one) for one in wraps], steps=steps, warm_ups=warm_ups)


def bench_ddp(*, steps: int = STEPS, warm_ups: int = WARM_UPS) -> dict[str, float]:
    """Print a line for each comparison; returns the median ratios and shares by name. About a minute on 2 cores."""
    print("ddp: 2 ranks of 1 thread, checks of messages off; a step is zero_grad, forward, backward and SGD")
    results: dict[str, float] = {}
    workloads: dict[str, Workload] = {"resnet18": image_workload, "transformer": text_workload}
    with Ranks(2, check=False) as ranks:
        for name, workload in workloads.items():
            found = Comparison.of(ranks.run(turns_beside_torch, workload, steps, warm_ups))
            print(found.line(f"ddp {name}", target=TARGET))
            results[name], results[f"{name} control"] = found.ratio.median, found.noise.median
        for count in PARAMETERS:
            found = Comparison.of(ranks.run(turns_beside_torch, many_small(count), steps, warm_ups))
            print(found.line(f"ddp {count} parameters of 1,024"))
            results[f"{count} parameters"] = found.ratio.median
    with Ranks(2, network=NETWORK, check=False) as ranks:
        for name, workload in workloads.items():
            for cap_mb in CAPS_MB:
                times = slowest(ranks.run(turns_of_overlap, workload, cap_mb, max(4, steps // 3), 2))
                overlapped, in_turn, silent = (statistics.median(one) for one in times)
                hidden = (in_turn - overlapped) / (in_turn - silent)
                print(
                    f"ddp {name}, buckets of {cap_mb} MB, emulated network ({NETWORK}): {1e3 * overlapped:.0f} ms "
                    f"overlapped, {1e3 * in_turn:.0f} ms one after the other, {1e3 * silent:.0f} ms without "
                    f"communication; {100 * hidden:.0f} % of the communication hidden"
                )
                results[f"{name} hidden, {cap_mb} MB"] = hidden
    return results
