"""Known mistakes, each by the gradients that it would give: what differs from the truth is compared with these."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from labkit.verify.courses import Named, Task
from labkit.verify.splitting import split
from labkit.verify.truth import combine, gradients_by_part, micro_batches_of, shards_of


@dataclass(frozen=True)
class Suspect:
    """A mistake: its short name, the sentence that explains it, and the gradients that each rank would then have.

    `factor` is, for a mistake in which ranks train alone, what a rank multiplies its gradient by, as a function of its
    own and the global weight.
    """

    cause: str
    sentence: str
    gradients: Sequence[Named]
    factor: Callable[[float, float], float] | None = None


def suspects(task: Task) -> Iterator[Suspect]:
    """The mistakes that one can tell by the gradients of the first step, the likeliest first."""
    size = task.world_size
    sums, weights = sums_by_rank(task)
    total = sum(weights)
    if size > 1:
        yield from _not_synchronised(sums, weights, total)
        yield from _badly_weighted(sums, weights, total)
    yield from _micro_batches(task, sums, total)
    if size > 1:
        yield from _one_rank(sums, weights, total)
        yield from _crossed_data(task)


def sums_by_rank(task: Task) -> tuple[list[Named], list[float]]:
    """For each rank the gradient of its loss sum at the start, and its weight."""
    parts = [micro_batches_of(shard, task.micro_batches) for shard in shards_of(task)]
    gradients, weights = gradients_by_part(task, parts)
    return [combine(mine, [1.0] * len(mine)) for mine in gradients], [sum(mine) for mine in weights]


def _alone(sums: list[Named], factors: list[float]) -> list[Named]:
    return [combine([one], [factor]) for one, factor in zip(sums, factors, strict=True)]


def _not_synchronised(sums: list[Named], weights: list[float], total: float) -> Iterator[Suspect]:
    size = len(sums)
    sentence = "not synchronised: every rank keeps the gradient of its own share of the batch"
    ways: list[tuple[Callable[[float, float], float], str]] = [
        (lambda own, everyones: size / everyones, ""),
        (lambda own, everyones: 1 / own if own else 0.0, ""),
        (lambda own, everyones: 1 / everyones, f" (and divides it by the {size} ranks)"),
    ]
    for factor, more in ways:
        factors = [factor(weight, total) for weight in weights]
        yield Suspect("not synchronised", sentence + more, _alone(sums, factors), factor)


def _badly_weighted(sums: list[Named], weights: list[float], total: float) -> Iterator[Suspect]:
    size = len(sums)
    if all(weights) and len(set(weights)) > 1:
        means = combine(sums, [1 / (weight * size) for weight in weights])
        told = ", ".join(f"{weight:g}" for weight in weights)
        yield Suspect(
            "mean of means",
            f"a mean of the ranks' means: ranks with {told} samples or tokens count alike; divide each rank's loss sum "
            f"by the global weight ({total:g}) and multiply it by the number of ranks",
            [means] * size,
        )


def _micro_batches(task: Task, sums: list[Named], total: float) -> Iterator[Suspect]:
    """Guessed for 2, 3, 4 and 8 micro-batches where it isn't said how many there are."""
    size = task.world_size
    for count in [task.micro_batches] if task.micro_batches > 1 else [2, 3, 4, 8]:
        if count > max(task.shares):
            continue
        gradients, weights = gradients_by_part(task, [micro_batches_of(shard, count) for shard in shards_of(task)])
        if not all(weight for mine in weights for weight in mine):
            continue
        last, ends = [mine[-1] for mine in gradients], [mine[-1] for mine in weights]
        cause, sentence = "only the last micro-batch", f"only the last of {count} micro-batches counts"
        by_weight = combine(last, [1 / total] * size)
        for one in (by_weight, combine([by_weight], [count]), combine(last, [1 / (end * size) for end in ends])):
            yield Suspect(cause, sentence, [one] * size)
        if size > 1:
            early = [combine([one, end], [1, -1]) for one, end in zip(sums, last, strict=True)]
            mixed = [combine([own, by_weight], [size / total, 1]) for own in early]
            sentence = f"only the last of {count} micro-batches is synchronised; ranks keep the others to themselves"
            yield Suspect(cause, sentence, mixed)
        every = [one for mine in gradients for one in mine]
        means = combine(every, [1 / weight / size for mine in weights for weight in mine])
        yield Suspect(
            "micro-batches", f"summed over the means of {count} micro-batches, not divided by them", [means] * size
        )
        if len({weight for mine in weights for weight in mine}) > 1:
            sentence = f"a mean over the means of {count} micro-batches, as if all had as many samples or tokens"
            yield Suspect("mean of means", sentence, [combine([means], [1 / count])] * size)


def _one_rank(sums: list[Named], weights: list[float], total: float) -> Iterator[Suspect]:
    size = len(sums)
    for rank in range(size):
        sentence = f"all ranks have the gradient of rank {rank}'s share alone: broadcast rather than reduced"
        for factor in (size / total, 1 / total, 1 / weights[rank] if weights[rank] else 0.0):
            yield Suspect("one rank for all", sentence, [combine([sums[rank]], [factor])] * size)
    for rank in range(size) if size > 2 else ():
        rest = [0.0 if other == rank else 1.0 for other in range(size)]
        for factor in (1 / total, size / (size - 1) / total):
            sentence = f"the share of rank {rank} is missing from the reduction"
            yield Suspect("a rank is missing", sentence, [combine(sums, [one * factor for one in rest])] * size)


def _crossed_data(task: Task) -> Iterator[Suspect]:
    """Inputs of one share with the targets of another of the same size."""
    inputs, targets = split(task.inputs, task.shares), split(task.targets, task.shares)
    for by in range(1, task.world_size):
        if all(task.shares[i] == task.shares[(i + by) % task.world_size] for i in range(task.world_size)):
            crossed = [(inputs[i], targets[(i + by) % task.world_size]) for i in range(task.world_size)]
            gradients, weights = gradients_by_part(task, [[pair] for pair in crossed])
            pairs = ", ".join(f"{i} with {(i + by) % task.world_size}" for i in range(task.world_size))
            sentence = f"inputs and targets of different shares meet (inputs of rank {pairs}'s targets)"
            mean = combine([mine[0] for mine in gradients], [1 / sum(mine[0] for mine in weights)] * len(gradients))
            yield Suspect("swapped shards", sentence, [mean] * task.world_size)
