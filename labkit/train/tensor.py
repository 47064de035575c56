"""Tensor parallelism: every rank has a slice of the layers and sees every sample."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from labkit.collectives import ReduceOp
from labkit.mesh import Axis, as_axis
from labkit.mesh.axes import AxisLike
from labkit.models.encoder import TokenHead, Transformer
from labkit.parallel.tensor import full_state, loss_parallel, parallel_argmax, parallelize_module, plan_for
from labkit.train.computing import Computing
from labkit.train.settings import ConfigError
from labkit.train.strategies import Strategy
from labkit.train.sums import reduced
from labkit.train.workloads import Workload


class TensorParallel(Strategy):
    """Training with `parallelize_module` by labkit's own plans. Every rank reads the whole batch.

    The logits of a token head stay in slices of the vocabulary.
    """

    same_random_numbers = True

    def __init__(
        self,
        workload: Workload,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        device: torch.device,
        *,
        computing: Computing | None = None,
        axis: AxisLike = None,
    ) -> None:
        self.axis = as_axis(axis)
        if isinstance(workload.model, Transformer) and isinstance(workload.model.head, TokenHead):
            values = {field.name: getattr(workload, field.name) for field in fields(Workload)}
            workload = SlicedLogits(**values, axis=self.axis)
        super().__init__(workload, make_optimizer, device, computing=computing)

    def prepare(self) -> None:
        try:
            parallelize_module(self.model, self.axis, plan_for(self.model))
        except ValueError as error:
            raise ConfigError(f"tp={self.axis.size}: {error}") from None

    def skip_together(self) -> list[AxisLike]:
        """Each rank has slices of the gradients."""
        return [self.axis]

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """All ranks have the same batch and see the same loss: the largest, so that any rank may ask to stop."""
        return reduced(values, ReduceOp.MAX, self.axis, self.device, algorithm="naive")

    def full_state(self) -> dict[str, Tensor]:
        return full_state(self.model)


@dataclass(frozen=True)
class SlicedLogits(Workload):
    """A workload whose output are this rank's logits [..., C / N]."""

    axis: Axis

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        with loss_parallel(group=self.axis):
            return Workload.loss(output, targets)

    def correct(self, output: Tensor, targets: Tensor) -> int:  # type: ignore[override]
        return int((parallel_argmax(output, self.axis) == targets).sum())
