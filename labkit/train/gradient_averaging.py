"""Data parallelism in its simplest right form: after backward all gradients are averaged by one collective."""

from collections.abc import Callable, Iterable
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from labkit.collectives import ReduceOp, all_reduce, broadcast
from labkit.mesh import as_axis, place, placement_of
from labkit.mesh.axes import AxisLike
from labkit.train.strategies import Strategy
from labkit.train.workloads import Workload


class GradientAveraging(Strategy):
    """Every rank has the whole model and takes its share of each batch.

    All gradients travel in one flat buffer (one for each dtype), with one number a parameter that says whether a rank
    has a gradient at all: a parameter that no rank has used keeps None, one that some have used counts zeros for the
    others.
    """

    def __init__(
        self,
        workload: Workload,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        device: torch.device,
        *,
        axis: AxisLike = None,
    ) -> None:
        self.axis = as_axis(axis)
        self.shares, self.share = self.axis.size, self.axis.coordinate
        super().__init__(workload, make_optimizer, device)

    def prepare(self) -> None:
        """All ranks start from the first one's parameters and buffers."""
        self._broadcast([*self.model.parameters(), *self.model.buffers()])
        for parameter in self.model.parameters():
            place(parameter, placement_of(parameter).replicated(self.axis))

    def reduce_gradients(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for alike in _by_dtype(trained):
            self._average(alike)

    def _average(self, parameters: list[Tensor]) -> None:
        used = torch.tensor([float(one.grad is not None) for one in parameters])
        parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        flat = torch.cat([*(part.reshape(-1) for part in parts), used.to(parts[0])])
        all_reduce(flat, ReduceOp.AVG, self.axis.group)
        *averages, used = flat.split([*(part.numel() for part in parts), len(parts)])
        for parameter, average, somewhere in zip(parameters, averages, used.tolist(), strict=True):
            if somewhere:
                parameter.grad = average.view_as(parameter)

    def synchronise_buffers(self) -> None:
        self._broadcast(list(self.model.buffers()))

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        all_reduce(sums, ReduceOp.SUM, self.axis.group)
        return sums.tolist()

    def _broadcast(self, tensors: list[Tensor]) -> None:
        for alike in _by_dtype(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
            broadcast(flat, self.axis.ranks[0], self.axis.group)
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.detach().copy_(part.view_as(tensor))


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups of one dtype, each in their order."""
    ordered = sorted(tensors, key=lambda tensor: str(tensor.dtype))
    return [list(group) for _, group in groupby(ordered, key=lambda tensor: tensor.dtype)]
