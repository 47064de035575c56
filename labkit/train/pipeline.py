"""Pipeline parallelism: every rank has some of the layers, and micro-batches of each batch pass through them."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from labkit.collectives import ReduceOp, recv, send
from labkit.collectives.calls import operation
from labkit.collectives.groups import endpoint
from labkit.memory import checkpoint_blocks
from labkit.memory.checkpoint_policies import blocks_of
from labkit.mesh import as_axis
from labkit.mesh.axes import AxisLike
from labkit.parallel.pipeline import KNOWN, PipelineSchedule, PipelineStage, split_model
from labkit.record import span
from labkit.train.computing import Computing
from labkit.train.settings import ConfigError
from labkit.train.snapshot_exchange import Exchange
from labkit.train.strategies import Strategy
from labkit.train.sums import Sums, reduced
from labkit.train.workloads import Workload


class PipelineParallel(Strategy):
    """Training in a pipeline of as many stages as the axis has ranks, split evenly by parameters.

    Every rank reads the whole batch: the first stage's needs the inputs, the last one's the targets. `model` keeps this
    rank's parameters only, under their original names. Of losses and hits only the last rank knows.
    """

    def __init__(
        self,
        workload: Workload,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        device: torch.device,
        *,
        computing: Computing | None = None,
        axis: AxisLike = None,
        schedule: str = "1f1b",
        micro_batches: int = 0,
        checkpoint: str | int = "none",
    ) -> None:
        self.axis = as_axis(axis)
        self.made, self.policy = KNOWN[schedule], checkpoint
        self.micro_batches = micro_batches or 4 * self.axis.size
        super().__init__(workload, make_optimizer, device, computing=computing)

    def prepare(self) -> None:
        """Split the model, and keep one stage of it."""
        stages, mine = self.axis.size, self.axis.coordinate
        self.state_names = list(self.model.state_dict())
        try:
            split = split_model(self.model, stages)
        except ValueError as error:
            raise ConfigError(f"pp={stages}: {error}") from None
        for stage in range(stages):
            if not any(parameter.requires_grad for parameter in split.parameters(stage).values()):
                raise ConfigError(f"pp={stages} leaves stage {stage} without a parameter to train: give fewer stages")
        own = set(split.module(mine).modules())
        blocks = [block for block in blocks_of(self.model) if block in own]
        if blocks:
            checkpoint_blocks(self.model, self.policy, blocks=blocks)
        module = Cast(split.module(mine), self.computing, self.device)
        stage_here = PipelineStage(module, mine, stages, self.device, group=self.axis, tied=split.tied)
        split.release([mine])
        self.schedule = PipelineSchedule(stage_here, self.made, self.micro_batches, self._loss, weighted=True)

    def _loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return self.computing.loss(self.workload, output, targets), self.workload.weight(targets)

    def forward_backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Sums:
        losses: list[Any] = []
        weight = 1 / scale if scale else math.inf  # where no target counts, neither does a gradient
        output = self.schedule.step(inputs, target=targets, losses=losses, weight=weight)
        return self._sums(output, targets, losses)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Sums:
        losses: list[Any] = []
        output = self.schedule.eval(inputs, target=targets, losses=losses)
        return self._sums(output, targets, losses)

    def _sums(self, output: Tensor | None, targets: Tensor, losses: list[Any]) -> Sums:
        sums = Sums(samples=len(targets))
        if output is not None:
            total = sum(float(loss) for loss, _ in losses)
            sums.add(total, self.workload.correct(output, targets), self.workload.weight(targets))
        return sums

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """All ranks have the same batch, so that a value is the same wherever it is known, and 0 elsewhere: the largest
        of each."""
        return reduced(values, ReduceOp.MAX, self.axis, self.device, algorithm="naive")

    def full_state(self) -> dict[str, Tensor]:
        """The whole model's state on the CPU, on the first rank; on the others their own part."""
        own = {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        end, whole = endpoint(self.axis.group), dict(own)
        told = Exchange(end.group).gather([(name, list(one.shape), _name(one.dtype)) for name, one in own.items()])
        with span("gather state", "other"), operation("state", end, control=True):
            for place, tensors in enumerate(told):
                for name, shape, dtype in tensors if place else []:
                    if end.place == 0:
                        received = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                        recv(received, group=end.group, group_src=place)
                        whole.setdefault(name, received.cpu())
                    elif end.place == place:
                        send(own[name].to(self.device), group=end.group, group_dst=0)
        if end.place == 0:  # tied parameters go by several names
            whole = {name: whole[name] for name in self.state_names}
        return {name: tensor.clone() for name, tensor in whole.items()}


class Cast(nn.Module):
    """A stage in the run's precision."""

    def __init__(self, module: nn.Module, computing: Computing, device: torch.device) -> None:
        super().__init__()
        self.module, self.computing, self.device = module, computing, device

    def forward(self, *values: Any) -> Any:
        with self.computing.cast(self.device):
            return self.module(*values)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
