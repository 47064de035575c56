"""`labkit progress`: what the learner has opened, predicted and solved, and how long it took."""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.learn.answers import write_number
from labkit.learn.exercises import every_exercise
from labkit.learn.progress_file import Progress, learners_path, load_progress
from labkit.words import _


def progress_command(argv: Sequence[str] | None = None) -> int:
    """Print the learner's progress as a table, or as JSON with `--json`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="labkit progress", description="What you have opened, predicted and solved. Nothing leaves this machine."
    )
    parser.add_argument("--json", action="store_true", help="print the file as JSON")
    parser.add_argument("--file", type=Path, help="read this file of progress instead of your own")
    options = parser.parse_args(argv)
    named = os.environ.get("LABKIT_PROGRESS")
    path = options.file or (Path(named).expanduser() if named else learners_path())
    try:
        progress = load_progress(path)
    except (OSError, ValueError) as error:
        print(_("The progress in {path} can't be read: {reason}.").format(path=path, reason=error))
        return 1
    print(json.dumps(progress, indent=1, ensure_ascii=False) if options.json else report(progress, path))
    return 0


def report(progress: Progress, path: Path) -> str:
    """The progress as text: one line a lesson, then the exercises and the predictions of each."""
    lessons = sorted({*progress["lessons"], *(one.get("lesson", "") for one in _entries(progress))})
    if not lessons:
        return _("Nothing yet: open a lesson with `make lab`. Progress will be kept in {path}.").format(path=path)
    blocks = [_lesson(progress, lesson) for lesson in lessons]
    return "\n\n".join([*blocks, _("Kept in {path}; nothing leaves this machine.").format(path=path)])


def _entries(progress: Progress) -> list[dict[str, Any]]:
    return [*progress["predictions"].values(), *progress["exercises"].values()]


def _lesson(progress: Progress, lesson: str) -> str:
    entry = progress["lessons"].get(lesson, {})
    state = _("finished on {day}") if entry.get("finished") else _("opened on {day}")
    day = str(entry.get("finished") or entry.get("opened") or "")[:10]
    minutes = round(float(entry.get("active_seconds", 0)) / 60)
    head = _("Lesson {lesson}").format(lesson=lesson or "?")
    if day:
        head += ": " + state.format(day=day) + ", " + _("{minutes} minutes at work").format(minutes=minutes)
    lines = [head]
    for key, one in sorted(progress["predictions"].items()):
        if one.get("lesson", "") == lesson:
            lines.append(f"  {_prediction(key, one)}")
    titles = {one.id: one.title for one in every_exercise()}
    for key, one in sorted(progress["exercises"].items()):
        if one.get("lesson", "") == lesson:
            lines.append(f"  {_exercise(_(titles.get(key, key)), one)}")
    factors = [
        one["factor"] for one in progress["predictions"].values() if one.get("lesson", "") == lesson and _factor(one)
    ]
    if factors:
        median = statistics.median(max(factor, 1 / factor) for factor in factors)
        lines.append("  " + _("predictions were off by a factor of {factor:.2f} in the median").format(factor=median))
    return "\n".join(lines)


def _factor(entry: dict[str, Any]) -> bool:
    return isinstance(entry.get("factor"), (int, float)) and entry["factor"] > 0


def _prediction(key: str, entry: dict[str, Any]) -> str:
    text = _("predicted {key}: {value}").format(key=key, value=_amount(entry, "value"))
    if "measured" in entry:
        text += ", " + _("measured {value}").format(value=_amount(entry, "measured"))
    return text


def _amount(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    number = write_number(float(value)) if isinstance(value, (int, float)) else str(value)
    return f"{number} {entry.get('unit', '')}".strip()


def _exercise(title: str, entry: dict[str, Any]) -> str:
    state = _("solved") if entry.get("passed") else _("not solved yet")
    parts = [state, _("{count} attempts").format(count=entry.get("attempts", 0))]
    if entry.get("hints_seen"):
        parts.append(_("{count} hints").format(count=entry["hints_seen"]))
    if entry.get("solution_seen"):
        parts.append(_("solution seen"))
    return _("exercise {title}: {parts}").format(title=title, parts=", ".join(parts))
