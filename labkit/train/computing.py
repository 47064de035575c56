"""How a rank computes its share of a step: in which numbers, and in how many micro-batches.

Every strategy that runs forward and backward itself does so by `Computing.forward_backward`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.data.token_blocks import IGNORE
from labkit.memory.accumulation import Scaler, add_gradients
from labkit.precision import autocast
from labkit.train.sums import Sums
from labkit.train.workloads import Workload

#: precisions that are an autocast, over weights in float32
CAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Computing:
    """`precision` as in TrainConfig; `accumulate` is into how many micro-batches a share is cut."""

    precision: str = "float32"
    accumulate: int = 1

    @property
    def scales(self) -> bool:
        """Whether losses must be scaled, since gradients would underflow."""
        return self.precision == "float16"

    def cast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Inside, forward and loss compute in the run's precision."""
        return autocast(device.type, CAST[self.precision]) if self.precision in CAST else nullcontext()

    def forward_backward(
        self,
        network: Callable[[Tensor], Tensor],
        workload: Workload,
        inputs: Tensor,
        targets: Tensor,
        scale: float,
        *,
        scaler: Scaler | None = None,
        no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
        same_number: bool = False,
    ) -> Sums:
        """Add the gradient of the share's loss sum times `scale` to the parameters' gradients.

        All micro-batches but the last run in `no_sync()`. `same_number` fills up a share of fewer samples than
        micro-batches with some that don't count: for networks in whose every forward the ranks are in step.
        """
        sums = Sums(samples=len(targets))

        def forward(inputs: Tensor) -> Tensor:
            with self.cast(inputs.device):
                return network(inputs)

        def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
            total, weight = self.loss(workload, output, targets), workload.weight(targets)
            with torch.no_grad():
                sums.add(total.item(), workload.correct(output, targets), weight)
            return total, weight

        parts = self.cut(inputs, targets, same_number=same_number)
        add_gradients(forward, parts, loss, scale, no_sync=no_sync, scaler=scaler)
        return sums

    def evaluate(
        self, network: Callable[[Tensor], Tensor], workload: Workload, inputs: Tensor, targets: Tensor
    ) -> Sums:
        """Loss and hits of a share of a batch, without gradients."""
        with torch.no_grad():
            with self.cast(inputs.device):
                output = network(inputs)
            total = self.loss(workload, output, targets)
            return Sums(total.item(), workload.correct(output, targets), workload.weight(targets), len(targets))

    def loss(self, workload: Workload, output: Tensor, targets: Tensor) -> Tensor:
        """The workload's loss sum, in float32 where the output has 16 bits."""
        with self.cast(output.device):
            return workload.loss(output, targets)

    def cut(self, inputs: Tensor, targets: Tensor, *, same_number: bool = False) -> list[tuple[Tensor, Tensor]]:
        """A share in micro-batches that differ by one sample at most, the larger ones first."""
        count = min(self.accumulate, len(targets))
        parts = list(zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True))
        if same_number and count < self.accumulate:
            parts += [(inputs[:1], torch.full_like(targets[:1], IGNORE))] * (self.accumulate - count)
        return parts
