"""Data parallelism: every rank has the whole model and takes its share of each batch."""

from collections.abc import Callable, Iterable

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from labkit.collectives import ReduceOp
from labkit.mesh import as_axis
from labkit.mesh.axes import AxisLike
from labkit.parallel import DistributedDataParallel, SyncBatchNorm
from labkit.train.computing import Computing
from labkit.train.strategies import Strategy
from labkit.train.sums import reduced
from labkit.train.workloads import Workload


class DataParallel(Strategy):
    """Training with `DistributedDataParallel`, which averages gradients while backward computes."""

    def __init__(
        self,
        workload: Workload,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        device: torch.device,
        *,
        computing: Computing | None = None,
        axis: AxisLike = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self.axis, self.find_unused_parameters = as_axis(axis), find_unused_parameters
        self.shares, self.share = self.axis.size, self.axis.coordinate
        super().__init__(workload, make_optimizer, device, computing=computing)

    def prepare(self) -> None:
        """All ranks start from the first one's parameters and buffers."""
        self.wrapper = DistributedDataParallel(
            self.model, process_group=self.axis, find_unused_parameters=self.find_unused_parameters
        )
        self.network = self.wrapper
        self.in_step = any(isinstance(module, SyncBatchNorm) for module in self.model.modules())

    def synchronise_buffers(self) -> None:
        self.wrapper.broadcast_buffers()

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return reduced(values, ReduceOp.SUM, self.axis, self.device)
