"""ZeRO: ranks share a batch as in data parallel, and shard what every one of them would hold."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from labkit.collectives import ReduceOp
from labkit.collectives.groups import endpoint
from labkit.memory.checkpoint_policies import blocks_of
from labkit.mesh import FlatPart, as_axis
from labkit.mesh.axes import AxisLike
from labkit.parallel import SyncBatchNorm, ZeroRedundancyOptimizer, fully_shard
from labkit.parallel.data_parallel.replicas import broadcast_tensors
from labkit.parallel.zero import full_state
from labkit.train.computing import Computing
from labkit.train.strategies import Strategy
from labkit.train.sums import Sums, reduced
from labkit.train.workloads import Workload


def units_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a network, each of which is gathered as one unit; none where it has no blocks that are known."""
    try:
        return blocks_of(model)
    except ValueError:
        return []


class _Sharing(Strategy):
    """What all stages have in common."""

    def __init__(
        self,
        workload: Workload,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        device: torch.device,
        *,
        stage: int,
        computing: Computing | None = None,
        axis: AxisLike = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self.stage, self.axis, self.find_unused_parameters = stage, as_axis(axis), find_unused_parameters
        self.shares, self.share = self.axis.size, self.axis.coordinate
        super().__init__(workload, make_optimizer, device, computing=computing)

    def forward_backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Sums:
        # as data parallel: a step begins with the first rank's statistics
        self.synchronise_buffers()
        return super().forward_backward(inputs, targets, scale)

    def synchronise_buffers(self) -> None:
        buffers = list(self.model.buffers())
        if buffers:
            broadcast_tensors(buffers, endpoint(self.axis.group))

    def skip_together(self) -> list[AxisLike]:
        """Each rank sees a part of the gradients only."""
        return [self.axis]

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return reduced(values, ReduceOp.SUM, self.axis, self.device)


class ShardedOptimizer(_Sharing):
    """Stages 1 and 2: by `ZeroRedundancyOptimizer`."""

    zero: ZeroRedundancyOptimizer

    def prepare(self) -> None:
        self.in_step = any(isinstance(module, SyncBatchNorm) for module in self.model.modules())

    def build_optimizer(self, make: Callable[[Iterable[Parameter]], Optimizer]) -> Optimizer:
        self.zero = ZeroRedundancyOptimizer(
            self.model.parameters(),
            make,
            stage=self.stage,
            process_group=self.axis,
            find_unused_parameters=self.find_unused_parameters,
        )
        return self.zero

    @property
    def no_sync(self) -> Callable[[], AbstractContextManager[Any]]:
        return self.zero.no_sync

    @property
    def snapshot_optimizer(self) -> Optimizer:
        return self.zero.optim

    def stepped(self) -> Mapping[str, Tensor | FlatPart]:
        return self.zero.stepped(self.model)


class ShardedModel(_Sharing):
    """Stage 3: by `fully_shard`, each block of the network a unit, and the rest the root's."""

    def prepare(self) -> None:
        options: dict[str, Any] = {"mesh": self.axis, "find_unused_parameters": self.find_unused_parameters}
        for block in units_of(self.model):
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        # gathers and statistics are calls that all ranks make together in every forward
        self.in_step = True

    def full_state(self) -> dict[str, Tensor]:
        return full_state(self.model)
