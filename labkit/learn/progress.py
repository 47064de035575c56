"""What is noted of a learner's work: lessons opened and finished, predictions, exercises, hints, solutions.

Times are ISO 8601 in UTC. Active seconds add up the gaps between two things done in a lesson, pauses left out.
"""

import os
import re
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from labkit.learn.progress_file import Progress, change_progress, read_progress

PAUSE_SECONDS = 15 * 60.0

Entry = dict[str, Any]
_lesson: str | None = None


def now() -> str:
    """This moment, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def current_lesson() -> str:
    """The lesson that runs, as "00": named by the lesson itself, else read from the notebook's name, else ""."""
    if _lesson is not None:
        return _lesson
    number = re.match(r"\d+", PurePath(os.environ.get("JPY_SESSION_NAME", "")).name)
    return number.group() if number else ""


def set_lesson(lesson: str | None) -> None:
    """Say which lesson runs in this process."""
    global _lesson
    _lesson = lesson


def note_lesson(*, finished: bool = False) -> None:
    """Note that the learner is at work in the lesson, or has come to its end."""
    change_progress(lambda progress: _touch(progress, finished=finished))


def kept_prediction(key: str) -> Entry | None:
    """What was predicted for `key`, or None."""
    entry = read_progress()["predictions"].get(key)
    return entry if entry is not None and "value" in entry else None


def note_prediction(key: str, value: float | str, unit: str, *, after_measurement: bool) -> None:
    """Keep a prediction; an earlier measurement for it is no longer its counterpart."""

    def change(progress: Progress) -> None:
        _touch(progress)
        entry: Entry = {"lesson": current_lesson(), "value": value, "unit": unit, "when": now()}
        if after_measurement:
            entry["after_measurement"] = True
        progress["predictions"][key] = entry

    change_progress(change)


def note_measurement(key: str, measured: float | str, factor: float | None) -> None:
    """Set the measurement beside the prediction, with predicted / measured as `factor` where that says something."""

    def change(progress: Progress) -> None:
        _touch(progress)
        entry = progress["predictions"].get(key)
        if entry is not None:
            entry.update(measured=measured, factor=factor)

    change_progress(change)


def exercise_entry(exercise_id: str) -> Entry:
    """What is noted of an exercise."""
    entry: Entry = {"attempts": 0, "hints_seen": 0, "passed": None, "solution_seen": None}
    return {**entry, **read_progress()["exercises"].get(exercise_id, {})}


def note_attempt(exercise_id: str, lesson: str, *, passed: bool) -> None:
    """Note one checked attempt at an exercise."""

    def change(entry: Entry) -> None:
        entry["attempts"] += 1
        entry["passed"] = entry["passed"] or (now() if passed else None)

    _change_exercise(exercise_id, lesson, change)


def note_hints(exercise_id: str, lesson: str, seen: int) -> None:
    """Note that the first `seen` hints have been unfolded."""
    _change_exercise(exercise_id, lesson, lambda entry: entry.update(hints_seen=max(seen, entry["hints_seen"])))


def note_solution(exercise_id: str, lesson: str) -> None:
    """Note that the solution was asked for."""
    _change_exercise(exercise_id, lesson, lambda entry: entry.update(solution_seen=entry["solution_seen"] or now()))


def _change_exercise(exercise_id: str, lesson: str, change: Any) -> None:
    def whole(progress: Progress) -> None:
        _touch(progress)
        fresh: Entry = {"lesson": lesson, "attempts": 0, "hints_seen": 0, "passed": None, "solution_seen": None}
        entry = {**fresh, **progress["exercises"].get(exercise_id, {})}
        change(entry)
        progress["exercises"][exercise_id] = entry

    change_progress(whole)


def _touch(progress: Progress, *, finished: bool = False) -> None:
    lesson, moment = current_lesson(), now()
    if not lesson:
        return
    fresh: Entry = {"opened": moment, "last_seen": moment, "finished": None, "active_seconds": 0.0}
    entry = {**fresh, **progress["lessons"].get(lesson, {})}
    gap = _seconds_between(entry["last_seen"], moment)
    entry["active_seconds"] += gap if 0 < gap < PAUSE_SECONDS else 0.0
    entry["last_seen"] = moment
    if finished:
        entry["finished"] = entry["finished"] or moment
    progress["lessons"][lesson] = entry


def _seconds_between(earlier: str, later: str) -> float:
    try:
        return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except (ValueError, TypeError):
        return 0.0  # a time that somebody edited by hand
