"""A strategy: how the ranks share one training step. The loop knows no other difference between them.

`Strategy` itself trains in one process. Others override what they do differently: wrap the model, reduce gradients
after backward, step a part of the parameters, or run forward and backward of many micro-batches by a schedule.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from labkit.mesh import FlatPart, Placement, clip_grad_norm_, placements_of
from labkit.mesh.axes import AxisLike
from labkit.precision import GradScaler
from labkit.record import span
from labkit.train.computing import Computing
from labkit.train.sums import Sums
from labkit.train.workloads import Workload


class Strategy:
    """Training in one process.

    Attributes:
        model: the network under its original names, on this rank's device.
        network: what a training step's forward calls: the model, or a wrapper around it.
        optimizer: what `step` steps.
        shares: how many ranks share the global batch, by which the strategy divides gradients. 1 here.
        share: which of them this rank takes. 0 here.
        computing: in which precision and in how many micro-batches forward and backward run.
        scaler: what scales losses and steps the optimizer, None where the precision needs no scaling.
        same_random_numbers: whether all ranks must draw the same, as for dropout on what they all hold. False here.
        in_step: whether ranks meet within a forward, so that all must run equally many micro-batches. False here.
    """

    shares, share = 1, 0
    in_step = same_random_numbers = False

    def __init__(
        self,
        workload: Workload,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        device: torch.device,
        *,
        computing: Computing | None = None,
    ) -> None:
        self.workload, self.device, self.computing = workload, device, computing or Computing()
        self.network = self.model = workload.model.to(device)
        self.prepare()
        self.optimizer = self.build_optimizer(make_optimizer)
        self.scaler = GradScaler(device.type, groups=self.skip_together()) if self.computing.scales else None

    def prepare(self) -> None:
        """What happens to the model before the optimizer is built."""

    def build_optimizer(self, make: Callable[[Iterable[Parameter]], Optimizer]) -> Optimizer:
        """The optimizer of what this rank steps."""
        return make(self.model.parameters())

    @property
    def snapshot_optimizer(self) -> Optimizer:
        """The optimizer whose state a snapshot keeps, of what `stepped` says."""
        return self.optimizer

    # --- a step ---

    def forward_backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Sums:
        """Leave the gradient of the global mean loss in the parameters.

        Args:
            inputs, targets: this rank's share of the global batch.
            scale: what the share's loss sum is multiplied by: the number of shares over the step's global weight.
        """
        sums = self.computing.forward_backward(
            self.network, self.workload, inputs, targets, scale,
            scaler=self.scaler, no_sync=self.no_sync, same_number=self.in_step,
        )  # fmt: skip
        self.reduce_gradients()
        return sums

    @property
    def no_sync(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """In what all micro-batches of a step but the last run: the network's own, if it has one."""
        return getattr(self.network, "no_sync", None)

    def skip_together(self) -> list[AxisLike]:
        """Groups over which ranks must agree that a step is skipped: none where all hold the same gradients."""
        return []

    def reduce_gradients(self) -> None:
        """Average the gradients over the shares."""

    def clip(self, max_norm: float) -> float:
        """Scale the gradients so that the norm of all of them is at most `max_norm`; returns the norm before."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return float(clip_grad_norm_(self.model.parameters(), max_norm))

    def step(self) -> bool:
        """Step the optimizer, and free the gradients. Returns False where a scaler had to skip the step."""
        stepped = True
        with span("step", "step"):
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                stepped = not self.scaler.found_inf(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
        return stepped

    # --- besides ---

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Sums:
        """Loss and hits of this rank's share of a batch, without training."""
        return self.computing.evaluate(self.model, self.workload, inputs, targets)

    def synchronise_buffers(self) -> None:
        """Give every rank rank 0's buffers: before an evaluation, and before they are saved."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Each value summed over all shares."""
        return values

    def placements(self) -> dict[str, Placement]:
        """The Placement of every parameter by its original name."""
        return placements_of(self.model)

    def stepped(self) -> Mapping[str, Tensor | FlatPart]:
        """What the optimizer steps, by original name: for snapshots of its state."""
        return dict(self.model.named_parameters())

    def full_state(self) -> dict[str, Tensor]:
        """The whole model's state on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
