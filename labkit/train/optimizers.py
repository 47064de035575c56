"""The optimizer that a configuration asks for, and its learning rate."""

from collections.abc import Callable, Iterable

from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from labkit.train.config import TrainConfig


def optimizer_maker(config: TrainConfig) -> Callable[[Iterable[Parameter]], Optimizer]:
    """A function from parameters to their optimizer: strategies call it on what a rank steps."""

    def make(parameters: Iterable[Parameter]) -> Optimizer:
        if config.optimizer == "sgd":
            return SGD(parameters, lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay)
        return AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)

    return make


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set it for all groups of parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
