"""Lesson 06: how many micro-batches make a batch fit a memory."""

from collections.abc import Callable
from typing import Any

from labkit.learn.answers import write_number
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

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
