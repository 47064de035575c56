"""The properties that a check asks of an answer, each judged on what was observed: equality, bytes, messages, memory.

A finding names what was wanted, what was measured, and a likely cause. Properties never ask for time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.learn.answers import write_number
from labkit.learn.observations import Observation, Outcome
from labkit.words import _

Formula = Callable[[Outcome, int], float]
Cause = Callable[[Outcome, int], str]

#: Closeness in float32: the default of torch.testing.assert_close for rtol and atol.
RTOL, ATOL = 1.3e-6, 1e-5


@dataclass(frozen=True)
class Finding:
    """The verdict on one property in one trial."""

    passed: bool
    wanted: str = ""
    measured: str = ""
    cause: str = ""


@dataclass(frozen=True)
class Property:
    """Something that must hold in every trial: a short name, what it says in a sentence, and its judge."""

    name: str
    statement: str
    judge: Callable[[Outcome], Finding]


def equality(
    truth: Callable[[Outcome], list[Any]],
    *,
    statement: str,
    name: str = "equality",
    rtol: float = RTOL,
    atol: float = ATOL,
    cause: Cause | None = None,
) -> Property:
    """Each rank's tensor is close to `truth(outcome)[rank]`. Known slips (a factor of N) are named as causes."""

    def judge(outcome: Outcome) -> Finding:
        import torch

        for one, wanted in zip(outcome.ranks, truth(outcome), strict=True):
            value = torch.as_tensor(one.value)
            wanted = torch.as_tensor(wanted)
            if value.shape != wanted.shape:
                shapes = [_("shape {shape}").format(shape=tuple(tensor.shape)) for tensor in (wanted, value)]
                return Finding(False, shapes[0], _on(one.rank, outcome) + shapes[1], _("a dim is lost or added"))
            if not torch.allclose(value, wanted.to(value.dtype), rtol=rtol, atol=atol):
                likely = (cause(outcome, one.rank) if cause else "") or _slip(outcome, one, value, wanted)
                return Finding(False, _short(wanted), _on(one.rank, outcome) + _short(value), likely)
        return Finding(True)

    return Property(name, statement, judge)


def bytes_sent(formula: Formula, *, statement: str, name: str = "bytes", cause: Cause | None = None) -> Property:
    """Each rank sends exactly `formula(outcome, rank)` bytes of payload."""
    unit = _("bytes sent")
    return _counted(name, statement, lambda one: one.record.bytes_sent, formula, unit, cause)


def messages(formula: Formula, *, statement: str, name: str = "messages", cause: Cause | None = None) -> Property:
    """Each rank sends exactly `formula(outcome, rank)` messages of payload."""
    return _counted(name, statement, lambda one: one.record.messages, formula, _("messages sent"), cause)


def memory(
    kind: str,
    formula: Formula,
    *,
    statement: str,
    name: str = "memory",
    within: float = 0.0,
    cause: Cause | None = None,
) -> Property:
    """The peak of one kind of memory is `formula(outcome, rank)` bytes on each rank, `within` a part of it.

    It reads the record's memory entries, so the trial's `drive` must have them recorded.
    """
    unit = _("bytes of {kind} at the peak").format(kind=kind)
    return _counted(name, statement, lambda one: one.peak(kind), formula, unit, cause, within)


def _counted(
    name: str,
    statement: str,
    count: Callable[[Observation], int | None],
    formula: Formula,
    unit: str,
    cause: Cause | None,
    within: float = 0.0,
) -> Property:
    def judge(outcome: Outcome) -> Finding:
        for one in outcome.ranks:
            wanted, measured = formula(outcome, one.rank), count(one)
            if measured is None or abs(measured - wanted) > within * abs(wanted):
                found = _("nothing recorded") if measured is None else f"{write_number(float(measured))} {unit}"
                likely = (cause(outcome, one.rank) if cause else "") or _times(wanted, measured or 0)
                return Finding(False, f"{write_number(float(wanted))} {unit}", _on(one.rank, outcome) + found, likely)
        return Finding(True)

    return Property(name, statement, judge)


def _times(wanted: float, measured: float) -> str:
    if not measured:
        return _("nothing went through labkit.collectives, which is where it is counted")
    if wanted:
        text = _("that is {factor} times what is needed: something is sent twice, or to a rank that has it")
        return text.format(factor=f"{measured / wanted:.3g}") if measured > wanted else _("a part is never sent")
    return _("here nothing needs to be sent")


def _slip(outcome: Outcome, one: Observation, value: Any, wanted: Any) -> str:
    """What a wrong tensor tells about the slip behind it."""
    import torch

    n = outcome.world_size
    wanted = wanted.to(value.dtype)
    if value.is_floating_point() and not torch.isfinite(value).all():
        return _("there are numbers that are not finite: a division by zero, or memory that was never written")
    if n > 1 and torch.allclose(value, wanted * n, rtol=1e-4):
        return _("it is {n} times too large on {n} ranks: summed where an average is wanted").format(n=n)
    if n > 1 and value.is_floating_point() and torch.allclose(value * n, wanted, rtol=1e-4):
        return _("it is {n} times too small on {n} ranks: averaged where a sum is wanted, or twice").format(n=n)
    given = [item for item in outcome.inputs(one.rank) if isinstance(item, torch.Tensor)]
    if any(item.shape == value.shape and torch.equal(item, value) for item in given):
        return _("it is this rank's own input: nothing of the other ranks arrived")
    return ""


def _on(rank: int, outcome: Outcome) -> str:
    return _("rank {rank}: ").format(rank=rank) if outcome.world_size > 1 else ""


def _short(tensor: Any) -> str:
    flat = [write_number(float(item)) for item in tensor.flatten()[:4].tolist()]
    return ", ".join(flat) + (", …" if tensor.numel() > 4 else "") if flat else _("an empty tensor")
