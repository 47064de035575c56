"""A strategy: how the ranks share one training step. The loop knows no other difference between them.

`Strategy` itself trains in one process. Others override what they do differently: wrap the model, reduce gradients
after backward, step a part of the parameters, or run forward and backward of many micro-batches by a schedule.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from labkit.mesh import FlatPart, Placement, clip_grad_norm_, placements_of
from labkit.record import span
from labkit.train.workloads import Workload


@dataclass
class Sums:
    """What a rank's share of a step, or of an evaluation, adds up to."""

    loss: float = 0.0
    correct: int = 0
    weight: int = 0
    samples: int = 0


class Strategy:
    """Training in one process.

    Attributes:
        model: the network under its original names, on this rank's device.
        network: what a training step's forward calls: the model, or a wrapper around it.
        optimizer: what `step` steps.
        shares: how many ranks share the global batch, by which the strategy divides gradients. 1 here.
        share: which of them this rank takes. 0 here.
    """

    shares, share = 1, 0

    def __init__(
        self, workload: Workload, make_optimizer: Callable[[Iterable[Parameter]], Optimizer], device: torch.device
    ) -> None:
        self.workload, self.device = workload, device
        self.network = self.model = workload.model.to(device)
        self.prepare()
        self.optimizer = make_optimizer(self.model.parameters())

    def prepare(self) -> None:
        """What happens to the model before the optimizer is built."""

    # --- a step ---

    def forward_backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Sums:
        """Leave the gradient of the global mean loss in the parameters.

        Args:
            inputs, targets: this rank's share of the global batch.
            scale: what the share's loss sum is multiplied by: the number of shares over the step's global weight.
        """
        with span("forward", "forward"):
            output = self.network(inputs)
            loss = self.workload.loss(output, targets)
        with span("backward", "backward"):
            (loss * scale).backward()
        self.reduce_gradients()
        with torch.no_grad():
            return self._sums(output, targets, loss)

    def reduce_gradients(self) -> None:
        """Average the gradients over the shares."""

    def clip(self, max_norm: float) -> float:
        """Scale the gradients so that the norm of all of them is at most `max_norm`; returns the norm before."""
        return float(clip_grad_norm_(self.model.parameters(), max_norm))

    def step(self) -> None:
        """Step the optimizer, and free the gradients."""
        with span("step", "step"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    # --- besides ---

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Sums:
        """Loss and hits of this rank's share of a batch, without training."""
        with torch.no_grad():
            output = self.model(inputs)
            return self._sums(output, targets, self.workload.loss(output, targets))

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

    def _sums(self, output: Tensor, targets: Tensor, loss: Tensor) -> Sums:
        return Sums(loss.item(), self.workload.correct(output, targets), self.workload.weight(targets), len(targets))
