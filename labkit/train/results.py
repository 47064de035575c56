"""What a run came to."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy (0 to 1) over the whole test split after `step` steps."""

    step: int
    loss: float
    accuracy: float
    samples: int


@dataclass
class TrainResult:
    """What a run came to.

    Attributes:
        losses: the mean loss of the global batch in each step of this call.
        accuracies: the share of right answers in each step, 0 to 1.
        learning_rates: the learning rate of each step.
        gradient_norms: the norm of the gradients before clipping, where they are clipped.
        loss_scales: what the loss was multiplied by in each step, where it is scaled.
        skipped: how many steps of this call were left out, since a scaled gradient was infinite.
        evaluations: one for each evaluation in this call.
        first_step: how many steps were done before, from a snapshot; 0 for a new run.
        step: how many steps are done in all.
        epoch: the epoch it ended in, counted from 0.
        samples: samples trained on in this call, by all ranks.
        seconds: how long the steps of this call took, evaluation and snapshots left out.
        stopped: "SIGINT" or "SIGTERM" where it was ended from outside, else "".
        state_dict: the trained model's whole state, on the CPU.
        world_size: how many ranks trained.
        refused: newer snapshots that were passed over when resuming, each with its reason.
    """

    losses: list[float] = field(default_factory=list, repr=False)
    accuracies: list[float] = field(default_factory=list, repr=False)
    learning_rates: list[float] = field(default_factory=list, repr=False)
    gradient_norms: list[float] = field(default_factory=list, repr=False)
    loss_scales: list[float] = field(default_factory=list, repr=False)
    skipped: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)
    first_step: int = 0
    step: int = 0
    epoch: int = 0
    samples: int = 0
    seconds: float = 0.0
    stopped: str = ""
    state_dict: dict[str, Tensor] = field(default_factory=dict, repr=False)
    world_size: int = 1
    refused: list[str] = field(default_factory=list)

    @property
    def accuracy(self) -> float | None:
        """The accuracy of the last evaluation, None where there was none."""
        return self.evaluations[-1].accuracy if self.evaluations else None

    @property
    def samples_per_second(self) -> float:
        """Training samples a second, all ranks together; 0 where no step was done."""
        return self.samples / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank" + ("s" if self.world_size > 1 else "")
        words = [f"{self.step} steps", f"{ranks}", f"{self.samples_per_second:.0f} samples/s"]
        if self.losses:
            words.append(f"loss {self.losses[-1]:.4f}")
        if self.evaluations:
            words.append(f"test accuracy {self.evaluations[-1].accuracy:.2%}")
        if self.skipped:
            words.append(f"{self.skipped} of them skipped by the scaler")
        if self.stopped:
            words.append(f"stopped by {self.stopped}")
        return ", ".join(words)
