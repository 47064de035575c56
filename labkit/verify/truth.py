"""The truth: the same training in one process, on the whole batch or as a replay of what the ranks do.

A replay is needed where a model looks at its batch as a whole (BatchNorm's statistics) or draws random numbers
(dropout): there the result depends on how the batch is cut. One process then takes the shares one after the other,
each with the statistics and the random numbers of its rank, and adds up the gradients. The running statistics go as in
PyTorch's DistributedDataParallel with `broadcast_buffers`: all ranks begin a step with those of rank 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.verify.courses import (
    Course,
    Named,
    Task,
    buffers_of,
    gradients_of,
    load_buffers,
    made,
    mask_seed,
    weights_of,
)
from labkit.verify.splitting import even_sizes, rows_of, split

Shard = tuple[Any, Any]


def shards_of(task: Task) -> list[Shard]:
    """Each rank's inputs and targets."""
    return list(zip(split(task.inputs, task.shares), split(task.targets, task.shares), strict=True))


def micro_batches_of(shard: Shard, count: int) -> list[Shard]:
    """A share cut into `count` micro-batches, some of them shorter where it doesn't divide."""
    sizes = even_sizes(rows_of(shard[0]), count)
    return list(zip(split(shard[0], sizes), split(shard[1], sizes), strict=True))


def add_gradients(module: nn.Module, shard: Shard, task: Task) -> float:
    """Add the gradient of the shard's loss sum to the parameters' gradients; returns the shard's weight."""
    total, weight = task.loss(module(shard[0]), shard[1])
    if total.requires_grad:
        total.backward()
    return float(weight)


def divide_gradients(module: nn.Module, by: float) -> None:
    """Divide all gradients in place."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(by)


def whole_step(module: nn.Module, task: Task, step: int) -> None:
    """One backward pass over the whole batch: the gradient of its mean loss."""
    torch.manual_seed(mask_seed(task.seed, step, 0))
    total, weight = task.loss(module(task.inputs), task.targets)
    (total / weight).backward()


class Replay:
    """The backward passes of all ranks, one after the other, in one process."""

    def __init__(self, module: nn.Module, task: Task) -> None:
        self.task = task
        self.shards = [micro_batches_of(shard, task.micro_batches) for shard in shards_of(task)]
        self.buffers: list[Named] = [buffers_of(module) for _ in self.shards]

    def step(self, module: nn.Module, step: int) -> None:
        """Leave the gradient of the global mean loss in the parameters, and each rank's statistics in `buffers`."""
        begin, weight = self.buffers[0], 0.0
        for rank, micro_batches in enumerate(self.shards):
            load_buffers(module, begin)
            torch.manual_seed(mask_seed(self.task.seed, step, rank))
            for shard in micro_batches:
                weight += add_gradients(module, shard, self.task)
            self.buffers[rank] = buffers_of(module)
        divide_gradients(module, weight)


def run_truth(task: Task, reference: str, *, zero: bool = True) -> tuple[Course, list[Named]]:
    """The course in one process, and the buffers that each rank should end with.

    `zero=False` leaves out `zero_grad`, a mistake whose course is compared when looking for a cause.
    """
    module = made(task.build, task.dtype, task.seed)
    replay = Replay(module, task) if reference == "replay" else None
    forward_and_backward: Callable[[int], None] = (
        (lambda step: replay.step(module, step)) if replay else (lambda step: whole_step(module, task, step))
    )
    optimizer = task.optimizer(module.parameters())
    start, start_buffers = weights_of(module), buffers_of(module)
    first_gradients, first_weights = Named(), Named()
    for step in range(task.steps):
        if zero:
            optimizer.zero_grad()
        forward_and_backward(step)
        if step == 0:
            first_gradients = gradients_of(module)
        optimizer.step()
        if step == 0:
            first_weights = weights_of(module)
    buffers = replay.buffers if replay else [buffers_of(module)] * task.world_size
    end = gradients_of(module), weights_of(module), buffers[0]
    course = Course(start, start_buffers, first_gradients, first_weights, *end)
    return course, buffers


class Replicas:
    """N copies that each train on their own share: what comes out when ranks are not, or wrongly, synchronised."""

    def __init__(self, task: Task, factor: Callable[[float, float], float]) -> None:
        """`factor(own weight, global weight)` multiplies the gradient of a rank's loss sum."""
        self.task, self.factor = task, factor
        self.modules = [made(task.build, task.dtype, task.seed) for _ in task.shares]
        self.optimizers: list[Optimizer] = [task.optimizer(module.parameters()) for module in self.modules]
        self.shards = shards_of(task)

    def train(self, average: str) -> list[Named]:
        """The weights of each copy at the end. Parameters are averaged "never", "before" or "after" each step."""
        for step in range(self.task.steps):
            weights = []
            for rank, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
                optimizer.zero_grad()
                torch.manual_seed(mask_seed(self.task.seed, step, rank))
                weights.append(add_gradients(module, self.shards[rank], self.task))
            for module, weight in zip(self.modules, weights, strict=True):
                divide_gradients(module, 1 / (self.factor(weight, sum(weights)) or 1.0))
            if average == "before":
                self._average()
            for optimizer in self.optimizers:
                optimizer.step()
            if average == "after":
                self._average()
        return [weights_of(module) for module in self.modules]

    def buffers(self) -> list[Named]:
        """The buffers of each copy, never synchronised."""
        return [buffers_of(module) for module in self.modules]

    def _average(self) -> None:
        for copies in zip(*(module.parameters() for module in self.modules), strict=True):
            mean = torch.stack([copy.detach() for copy in copies]).mean(0)
            for copy in copies:
                copy.detach().copy_(mean)


def gradients_by_part(task: Task, parts: list[list[Shard]]) -> tuple[list[list[Named]], list[list[float]]]:
    """For each rank and each of its parts the gradient of the loss sum at the start, and the weight: nothing is
    synchronised. The random numbers go on from one part to the next."""
    module = made(task.build, task.dtype, task.seed)
    buffers = buffers_of(module)
    gradients: list[list[Named]] = []
    weights: list[list[float]] = []
    for rank, mine in enumerate(parts):
        load_buffers(module, buffers)
        torch.manual_seed(mask_seed(task.seed, 0, rank))
        gradients.append([])
        weights.append([])
        for part in mine:
            module.zero_grad()
            weights[-1].append(add_gradients(module, part, task))
            gradients[-1].append(gradients_of(module))
    return gradients, weights


def combine(named: list[Named], factors: list[float]) -> Named:
    """The weighted sum of gradients by name; None counts as zero unless all are None."""
    result = Named()
    for name in named[0]:
        terms: list[Tensor] = []
        for one, factor in zip(named, factors, strict=True):
            value = one[name]
            if value is not None:
                terms.append(value * factor)
        result[name] = torch.stack(terms).sum(0) if terms else None
    return result
