"""`check`: runs the learner's answer to an exercise and shows which properties hold.

It never raises in a lesson. Under LABKIT_STRICT=1, which the tests set, an answer that is not right raises CheckFailed.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.learn.exercises import Exercise, Trial, UnknownExercise, find_exercise, no_inputs
from labkit.learn.guarding import Survey, Trouble, survey
from labkit.learn.nonsense import describe
from labkit.learn.observations import Outcome
from labkit.learn.progress import note_attempt
from labkit.learn.properties import Finding, Property
from labkit.learn.surroundings import Place, live, show_text
from labkit.learn.untouched import is_untouched
from labkit.words import _


class CheckFailed(AssertionError):
    """Raised under LABKIT_STRICT=1 for an answer that is wrong, or not there."""


PASSED = Finding(True)


@dataclass(frozen=True)
class Line:
    """One property in the report. `status` is "passed", "failed" or "not reached"."""

    name: str
    statement: str
    status: str
    trials: int = 0
    trial: str = ""  # the first trial in which it failed
    finding: Finding = PASSED
    details: str = ""


@dataclass(frozen=True)
class Report:
    """What a check found."""

    exercise: Exercise
    lines: tuple[Line, ...] = ()
    untouched: bool = False

    @property
    def passed(self) -> bool:
        return not self.untouched and all(line.status == "passed" for line in self.lines)

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.lines if line.status == "failed"]

    def __str__(self) -> str:
        """One line, for an exception."""
        if self.untouched:
            return f"{self.exercise.id}: not tried yet"
        if self.passed:
            return f"{self.exercise.id}: all {len(self.lines)} properties hold"
        one = self.failed[0]
        cause = f"; likely cause: {one.finding.cause}" if one.finding.cause else ""
        return (
            f"{self.exercise.id}: {one.name} failed ({one.trial}): wanted {one.finding.wanted}, "
            f"measured {one.finding.measured}{cause}"
        )


def check(exercise_id: str, function: Callable[..., Any]) -> None:
    """Run `function`, the learner's answer, and show its properties, as `check("ring", ring_all_reduce)`.

    Each property is shown as passed or failed, with what was wanted, what was measured and a likely cause. The function
    runs on ranks of its own, in bounded time; whatever it does there is survived and named. Nothing is raised, but a
    CheckFailed under LABKIT_STRICT=1.
    """
    refusal = _refusal(exercise_id, function)
    if refusal:
        if _strict():
            raise CheckFailed(refusal)
        show_text(refusal)
        return
    from labkit.learn.check_report import render, waiting

    exercise = find_exercise(exercise_id)
    place = Place(waiting(exercise)) if live() else None
    report = examine(exercise, function)
    if not report.untouched:
        note_attempt(exercise.id, exercise.lesson, passed=report.passed)
    if place is not None:
        place.update(render(report))
    else:
        Place(render(report))
    if _strict() and not report.passed:
        raise CheckFailed(str(report))


def examine(exercise: Exercise, function: Callable[..., Any], *, seconds: float | None = None) -> Report:
    """The report on an answer. Shows and notes nothing."""
    if is_untouched(function):
        return Report(exercise, untouched=True)
    limit = exercise.seconds if seconds is None else seconds
    seen = survey(exercise, function, seconds=limit)
    if seen.untouched:
        return Report(exercise, untouched=True)
    lines = [_runs(exercise, seen, limit), _type(seen)]
    if any(trial.inputs is not no_inputs for trial in exercise.trials):
        lines.append(_judged(INPUTS, seen.outcomes))
    lines += [_judged(one, seen.outcomes) for one in exercise.properties]
    return Report(exercise, tuple(lines))


def _strict() -> bool:
    return os.environ.get("LABKIT_STRICT", "") not in ("", "0")


def _refusal(exercise_id: str, function: Any) -> str:
    try:
        exercise = find_exercise(exercise_id)
    except UnknownExercise as error:
        return str(error)
    if not callable(function):
        text = _('check wants the function itself: write check("{id}", {name}), without calling it.')
        return text.format(id=exercise.id, name=exercise.answer)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return _("check starts ranks of its own: call it in the notebook, not on a rank.")
    return ""


def _runs(exercise: Exercise, seen: Survey, limit: float) -> Line:
    statement = _("it runs to its end on every rank")
    troubles = [one for one in seen.troubles if one.kind != "nonsense"]
    wanted = _("a result within {limit:g} s").format(limit=limit)
    ended = len(seen.outcomes) + len(seen.troubles) - len(troubles)
    return _built_in("runs", statement, troubles, ended, wanted)


def _type(seen: Survey) -> Line:
    troubles = [one for one in seen.troubles if one.kind == "nonsense"]
    return _built_in("type", _("it returns what was asked for"), troubles, len(seen.outcomes), "")


def _built_in(name: str, statement: str, troubles: list[Trouble], ended: int, wanted: str) -> Line:
    if not troubles:
        return Line(name, statement, "passed" if ended else "not reached", ended)
    first = troubles[0]
    finding = Finding(False, first.wanted or wanted, first.measured, first.cause)
    return Line(name, statement, "failed", ended, first.trial.label, finding, first.details)


def _judged(one: Property, outcomes: list[Outcome]) -> Line:
    statement = _(one.statement)
    for outcome in outcomes:
        try:
            finding = one.judge(outcome)
        except Exception as error:  # a value so odd that the judge stumbles over it
            value = describe(outcome.values[0])
            cause = _("it can't be compared: {reason}").format(reason=error)
            finding = Finding(False, _("a value that can be judged"), value, cause)
        if not finding.passed:
            return Line(one.name, statement, "failed", len(outcomes), outcome.trial.label, finding)
    return Line(one.name, statement, "passed" if outcomes else "not reached", len(outcomes))


def _unchanged(outcome: Outcome) -> Finding:
    for one in outcome.ranks:
        if one.changed:
            names = [_name(outcome.trial, position) for position in one.changed]
            measured = _("changed on rank {rank}: {names}").format(rank=one.rank, names=", ".join(names))
            cause = _("an operation in place (with _ at its end, or +=): work on a clone")
            return Finding(False, _("inputs as they were"), measured, cause)
    return Finding(True)


def _name(trial: Trial, position: int) -> str:
    if position < len(trial.input_names):
        return trial.input_names[position]
    return _("input {number}").format(number=position + 1)


INPUTS = Property("inputs", _("it leaves its inputs as they were"), _unchanged)
