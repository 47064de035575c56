"""What the ranks add up of a step or an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit.collectives import all_reduce
from labkit.mesh import as_axis
from labkit.mesh.axes import AxisLike


@dataclass
class Sums:
    """What a rank's share of a step, or of an evaluation, adds up to."""

    loss: float = 0.0
    correct: int = 0
    weight: int = 0
    samples: int = 0

    def add(self, loss: float, correct: int, weight: int) -> None:
        """Those of one more micro-batch."""
        self.loss, self.correct, self.weight = self.loss + loss, self.correct + correct, self.weight + weight


def reduced(
    values: Sequence[float], op: Any, axis: AxisLike, device: torch.device, *, algorithm: str = "ring"
) -> list[float]:
    """Each value reduced by `op` over the axis, in float64."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    all_reduce(mine, op, as_axis(axis).group, algorithm=algorithm)
    return mine.tolist()
