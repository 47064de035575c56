"""`labkit bench precision`: steps under our autocast beside PyTorch's, and beside float32, in one process."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.bench.side_by_side import STEPS, WARM_UPS, Comparison, take_turns
from labkit.models import resnet, transformer
from labkit.precision import autocast, native

TARGET = 1.05  # times as long as torch.autocast's step, at most
Region = Callable[[], AbstractContextManager[Any]]


def workloads() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """A network, a batch and its classes, by name; the shapes are those of `labkit train`'s own sets."""
    torch.manual_seed(0)
    image = resnet(8, num_classes=10, in_channels=1), torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    text = transformer(vocab_size=8000, num_classes=12), torch.randint(1, 8000, (64, 64)), torch.randint(12, (64,))
    return {"image": image, "text": text}


def training_step(model: nn.Module, inputs: Tensor, targets: Tensor, region: Region) -> Callable[[], None]:
    """Forward and loss in the region, and backward."""

    def step() -> None:
        model.zero_grad()
        with region():
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()

    return step


def bench_precision(*, steps: int = STEPS, warm_ups: int = WARM_UPS) -> dict[str, float]:
    """Print a line for each workload; returns the median ratios by name. Under a minute on 2 cores."""
    found = native(torch.bfloat16)
    print(f"precision: bfloat16 by {found}" if found else "precision: this processor doesn't multiply bfloat16 itself")
    regions: list[Region] = [
        lambda: autocast("cpu"),
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cpu"),
        nullcontext,
    ]
    results: dict[str, float] = {}
    for name, workload in workloads().items():
        turns = take_turns([training_step(*workload, region) for region in regions], steps=steps, warm_ups=warm_ups)
        compared, plain = Comparison.of([turns[:3]]), turns[3]
        gain = statistics.median(plain) / statistics.median(compared.ours)
        print(f"{compared.line(f'precision {name}', target=TARGET)}; float32 takes {gain:.2f} times ours")
        results[name], results[f"{name} control"] = compared.ratio.median, compared.noise.median
        results[f"{name} float32"] = gain
    return results
