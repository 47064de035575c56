"""Lesson 06: a last micro-batch that is smaller."""

from collections.abc import Callable
from typing import Any

from labkit.learn.answers import write_number
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

SIZES = ((4, 4, 4, 2), (5, 1), (6,))  # rows of each micro-batch, in each trial
WIDTH, HIDDEN, CLASSES = 6, 16, 3


def network() -> Any:
    """A small classifier, the same at every call."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def in_parts(sizes: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Micro-batches of these sizes: inputs [rows, 6] and classes [rows], always the same."""
    import torch

    random = torch.Generator().manual_seed(60)
    rows = sum(sizes)
    inputs, targets = torch.randn(rows, WIDTH, generator=random), torch.randint(CLASSES, (rows,), generator=random)
    return list(zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True))


def parts_0(rank: int, world_size: int) -> tuple[Any, ...]:
    return (in_parts(SIZES[0]),)


def parts_1(rank: int, world_size: int) -> tuple[Any, ...]:
    return (in_parts(SIZES[1]),)


def parts_2(rank: int, world_size: int) -> tuple[Any, ...]:
    return (in_parts(SIZES[2]),)


PARTS = (parts_0, parts_1, parts_2)


def flat_gradient(module: Any) -> Any:
    """All gradients as one vector; a missing one is zeros."""
    import torch

    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return torch.cat([gradient.detach().flatten() for gradient in gradients])


def under_a_ledger(function: Callable[..., Any], parts: list[tuple[Any, Any]]) -> Any:
    """The gradient that the answer leaves in a network, its memory recorded."""
    from labkit.memory import MemoryLedger

    module = network()
    with MemoryLedger(module):
        function(module, parts)
    return flat_gradient(module)


def _sums(parts: list[tuple[Any, Any]]) -> list[Any]:
    """The gradient of each micro-batch's loss sum."""
    import torch.nn.functional as F

    found = []
    for inputs, targets in parts:
        module = network()
        F.cross_entropy(module(inputs), targets, reduction="sum").backward()
        found.append(flat_gradient(module))
    return found


def _whole_batch(outcome: Outcome) -> Finding:
    import torch

    (parts,) = outcome.inputs(0)
    sums, rows, found = _sums(parts), [len(targets) for _, targets in parts], outcome.values[0]
    truth = sum(sums) / sum(rows)
    if torch.allclose(found, truth, rtol=1e-5, atol=1e-6):
        return Finding(True)
    means = [one / count for one, count in zip(sums, rows, strict=True)]
    causes = [
        (
            sum(means) / len(means),
            _("a mean of means: a sample of a small micro-batch counts more than one of a large"),
        ),
        (sum(means), _("the means of the micro-batches are added up: divide by the samples of all of them")),
        (sum(sums), _("the loss is not divided by the number of samples")),
        (sum(sums) / rows[0] / len(rows), _("divided as if all micro-batches were as large as the first")),
        (sum(sums) / len(rows), _("divided by the number of micro-batches, and not by that of samples")),
        (sums[-1] / rows[-1], _("only the last micro-batch counts: what is between them that clears gradients?")),
        (sums[-1] / sum(rows), _("only the last micro-batch counts: what is between them that clears gradients?")),
        (sum(means) / sum(rows), _("each mean is divided once more by all samples: add sums, not means")),
        (sum(sums[:-1], torch.zeros_like(truth)) / max(1, sum(rows[:-1])), _("the last micro-batch is left out")),
        (
            sum(one / sum(rows[: number + 1]) for number, one in enumerate(sums)),
            _("divided by the samples seen so far: count those of all micro-batches before the first forward"),
        ),
        (torch.zeros_like(truth), _("there is no gradient at all: is backward called?")),
    ]
    cause = next((words for one, words in causes if torch.allclose(found, one, rtol=1e-4, atol=1e-6)), "")
    wanted = _("the gradient of the mean over all samples, of length {length:.4f}").format(length=truth.norm())
    return Finding(False, wanted, _("length {length:.4f}").format(length=found.norm()), cause)


def _one_graph_at_a_time(outcome: Outcome) -> Finding:
    from labkit.memory import cross_entropy_activations

    (parts,) = outcome.inputs(0)
    rows = [len(targets) for _, targets in parts]
    one = max(rows) * HIDDEN * 4 + cross_entropy_activations(max(rows), CLASSES)
    peak = outcome.ranks[0].peak("activations") or 0
    if peak <= 1.4 * one:
        return Finding(True)
    wanted = _("about {bytes} bytes of activations, those of one micro-batch").format(bytes=write_number(float(one)))
    measured = _("{bytes} bytes").format(bytes=write_number(float(peak)))
    cause = _("the graphs of several micro-batches are alive at once: call backward for each before the next forward")
    return Finding(False, wanted, measured, cause)


def _loss(module: Any, part: tuple[Any, Any], reduction: str = "mean") -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(module(part[0]), part[1], reduction=reduction)


def _rows(parts: list[tuple[Any, Any]]) -> int:
    return sum(len(targets) for _, targets in parts)


def mean_of_means(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    for part in micro_batches:
        (_loss(module, part) / len(micro_batches)).backward()


def adds_means(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    for part in micro_batches:
        _loss(module, part).backward()


def divides_nothing(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    for part in micro_batches:
        _loss(module, part, "sum").backward()


def as_large_as_the_first(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    rows = len(micro_batches[0][1]) * len(micro_batches)
    for part in micro_batches:
        (_loss(module, part, "sum") / rows).backward()


def clears_in_between(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    for part in micro_batches:
        module.zero_grad()
        (_loss(module, part, "sum") / _rows(micro_batches)).backward()


def one_backward_for_all(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    sum(_loss(module, part, "sum") for part in micro_batches).div(_rows(micro_batches)).backward()


def means_over_all(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    for part in micro_batches:
        (_loss(module, part) / _rows(micro_batches)).backward()


def leaves_out_the_last(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    for part in micro_batches[:-1]:
        (_loss(module, part, "sum") / _rows(micro_batches[:-1])).backward()


def counts_as_it_goes(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    for number, part in enumerate(micro_batches):
        (_loss(module, part, "sum") / _rows(micro_batches[: number + 1])).backward()


def the_whole_batch_at_once(module: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    import torch

    inputs, targets = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
    _loss(module, (inputs, targets)).backward()


register(
    Exercise(
        id="uneven",
        lesson="06",
        title=_("The last micro-batch is smaller"),
        dots=1,
        minutes=8,
        answer="accumulate_samples",
        hints=(
            _("The gradient of a sum is the sum of gradients, and `backward` adds. So each micro-batch may add its "
              "loss *sum*, divided by ... what?"),
            _("`reduction=\"sum\"`, and the number of samples of all micro-batches together, which you can count "
              "before the first forward."),
            _("Call `backward` in the loop: it frees the activations of its micro-batch."),
        ),
        properties=(
            Property("equality", _("the gradient is that of the mean over all samples"), _whole_batch),
            Property("memory", _("with the activations of one micro-batch at a time"), _one_graph_at_a_time),
        ),
        trials=tuple(
            Trial(
                _("micro-batches of {sizes} samples").format(sizes=", ".join(map(str, sizes))),
                inputs=parts, drive=under_a_ledger, input_names=("micro_batches",),
            )
            for sizes, parts in zip(SIZES, PARTS, strict=True)
        ),
        wrong_answers=(
            WrongAnswer("a mean of means", mean_of_means, "equality", "a mean of means"),
            WrongAnswer("adds means", adds_means, "equality", "are added up"),
            WrongAnswer("divides nothing", divides_nothing, "equality", "not divided by the number of samples"),
            WrongAnswer("as large as the first", as_large_as_the_first, "equality", "as large as the first"),
            WrongAnswer("clears in between", clears_in_between, "equality", "only the last micro-batch counts"),
            WrongAnswer("means over all samples", means_over_all, "equality", "add sums, not means"),
            WrongAnswer("leaves out the last", leaves_out_the_last, "equality", "is left out"),
            WrongAnswer("counts as it goes", counts_as_it_goes, "equality", "seen so far"),
            WrongAnswer("one backward for all", one_backward_for_all, "memory", "alive at once"),
            WrongAnswer("the whole batch at once", the_whole_batch_at_once, "memory", "alive at once"),
        ),
    )
)  # fmt: skip
