"""Lesson 06: a last micro-batch that is smaller, and how many micro-batches make a batch fit a memory."""

from collections.abc import Callable
from typing import Any

from labkit.learn.answers import write_number
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

# --- the last uneven micro-batch ---

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


# --- how many micro-batches fit ---

#: memory, what is held whatever the batch, what each sample adds, and samples; all but the last in bytes
CASES = (
    (1000, 800, 10, 64),
    (1000, 400, 10, 60),
    (1000, 400, 7, 100),
    (16_000, 15_000, 1000, 8),
    (1250, 1000, 100, 5),
)
NAMES = ("memory_bytes", "state_bytes", "bytes_per_sample", "batch_size")


def case_0(rank: int, world_size: int) -> tuple[int, ...]:
    return CASES[0]


def case_1(rank: int, world_size: int) -> tuple[int, ...]:
    return CASES[1]


def case_2(rank: int, world_size: int) -> tuple[int, ...]:
    return CASES[2]


def case_3(rank: int, world_size: int) -> tuple[int, ...]:
    return CASES[3]


def case_4(rank: int, world_size: int) -> tuple[int, ...]:
    return CASES[4]


def a_count(function: Callable[..., Any], *given: int) -> int:
    """The answer, a whole number."""
    value = function(*given)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value != int(value):
        raise Nonsense(describe(value), _("a whole number of micro-batches"))
    return int(value)


def right_count(memory: int, state: int, per_sample: int, batch_size: int) -> int:
    """Of the largest micro-batch that fits, as many as hold the batch."""
    return -(-batch_size // ((memory - state) // per_sample))


def _fits(outcome: Outcome) -> Finding:
    memory, state, per_sample, batch_size = outcome.inputs(0)
    said, right = outcome.values[0], right_count(memory, state, per_sample, batch_size)
    if said == right:
        return Finding(True)
    largest = -(-batch_size // said) if said > 0 else batch_size
    needs = state + largest * per_sample
    told = _("k = {k}: the largest has {rows} samples, so {needs} bytes of {memory}").format(
        k=said, rows=largest, needs=write_number(float(needs)), memory=write_number(float(memory))
    )
    wanted = _("k = {k}").format(k=right)
    if said < 1:
        return Finding(False, wanted, _("k = {k}").format(k=said), _("a batch is one micro-batch at least"))
    if needs > memory:
        if said == -(-batch_size * per_sample // (memory - state)):
            cause = _("it does not fit: a sample can't be cut, so how many whole ones fit beside the state?")
        elif state + batch_size // said * per_sample <= memory:
            cause = _("it does not fit: where k doesn't divide the batch, the largest has one sample more: round up")
        elif said == max(1, batch_size * per_sample // (memory - state)):
            cause = _("it does not fit: round up, where it doesn't divide")
        else:
            cause = _("it does not fit: what is held whatever the batch is not divided by k, nor is it nothing")
        return Finding(False, wanted, told, cause)
    if said == (memory - state) // per_sample:
        return Finding(False, wanted, told, _("that is how many samples fit at a time, not how many micro-batches"))
    cause = _("it fits, and fewer would do too: k need not divide the batch, and no byte need be left over")
    return Finding(False, wanted, told, cause)


def forgets_the_state(memory_bytes: int, state_bytes: int, bytes_per_sample: int, batch_size: int) -> int:
    return -(-batch_size * bytes_per_sample // memory_bytes)


def rounds_down(memory_bytes: int, state_bytes: int, bytes_per_sample: int, batch_size: int) -> int:
    return max(1, batch_size * bytes_per_sample // (memory_bytes - state_bytes))


def divides_the_state_too(memory_bytes: int, state_bytes: int, bytes_per_sample: int, batch_size: int) -> int:
    return -(-(state_bytes + batch_size * bytes_per_sample) // memory_bytes)


def one_sample_each(memory_bytes: int, state_bytes: int, bytes_per_sample: int, batch_size: int) -> int:
    return batch_size


def whole_samples_forgotten(memory_bytes: int, state_bytes: int, bytes_per_sample: int, batch_size: int) -> int:
    return -(-batch_size * bytes_per_sample // (memory_bytes - state_bytes))


def doubles(memory_bytes: int, state_bytes: int, bytes_per_sample: int, batch_size: int) -> int:
    k = 1
    while state_bytes + -(-batch_size // k) * bytes_per_sample > memory_bytes:
        k *= 2
    return k


def samples_that_fit(memory_bytes: int, state_bytes: int, bytes_per_sample: int, batch_size: int) -> int:
    return (memory_bytes - state_bytes) // bytes_per_sample


def the_smallest_one(memory_bytes: int, state_bytes: int, bytes_per_sample: int, batch_size: int) -> int:
    k = 1
    while state_bytes + batch_size // k * bytes_per_sample > memory_bytes:
        k += 1
    return k


def gives_a_fraction(memory_bytes: int, state_bytes: int, bytes_per_sample: int, batch_size: int) -> float:
    return batch_size * bytes_per_sample / (memory_bytes - state_bytes)


register(
    Exercise(
        id="fits",
        lesson="06",
        title=_("Predict how many micro-batches fit"),
        dots=1,
        minutes=6,
        answer="smallest_k",
        hints=(
            _("Parameters, gradients and optimizer state are held once, whatever k is. What remains of the memory?"),
            _("Into what remains goes the largest micro-batch, a whole number of samples."),
            _("-(-a // b) is a / b rounded up."),
        ),
        properties=(Property("count", _("the smallest k whose largest micro-batch fits beside the state"), _fits),),
        trials=tuple(
            Trial(
                _("{memory} bytes of memory, {state} of state, {each} a sample, {rows} samples").format(
                    memory=case[0], state=case[1], each=case[2], rows=case[3]
                ),
                inputs=inputs, drive=a_count, input_names=NAMES,
            )
            for case, inputs in zip(CASES, (case_0, case_1, case_2, case_3, case_4), strict=True)
        ),
        wrong_answers=(
            WrongAnswer("forgets the state", forgets_the_state, "count", "is not divided by k"),
            WrongAnswer("rounds down", rounds_down, "count", "round up"),
            WrongAnswer("divides the state too", divides_the_state_too, "count", "is not divided by k"),
            WrongAnswer("one sample each", one_sample_each, "count", "fewer would do"),
            WrongAnswer("cuts samples", whole_samples_forgotten, "count", "a sample can't be cut"),
            WrongAnswer("doubles k until it fits", doubles, "count", "need not divide the batch"),
            WrongAnswer("samples that fit", samples_that_fit, "count", "not how many micro-batches"),
            WrongAnswer("looks at the smallest", the_smallest_one, "count", "one sample more"),
            WrongAnswer("gives a fraction", gives_a_fraction, "type", ""),
        ),
    )
)  # fmt: skip
