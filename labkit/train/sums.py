"""What the ranks add up of a step or an evaluation."""

from dataclasses import dataclass


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
