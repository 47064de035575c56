"""Predictions, exercises, checks, hints, solutions, results and progress: what makes the lessons a workbook.

Names are looked up when they are first used, so that `import labkit.learn` stays light: it imports neither torch nor
ipywidgets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.learn.checking import CheckFailed as CheckFailed
    from labkit.learn.checking import check as check
    from labkit.learn.exercises import exercise as exercise
    from labkit.learn.expecting import expected as expected
    from labkit.learn.hints import hint as hint
    from labkit.learn.lesson_settings import choose as choose
    from labkit.learn.lesson_settings import require as require
    from labkit.learn.lesson_times import finish_lesson as finish_lesson
    from labkit.learn.lesson_times import start_lesson as start_lesson
    from labkit.learn.predictions import predict as predict
    from labkit.learn.predictions import reveal as reveal
    from labkit.learn.progress_report import progress_command as progress_command
    from labkit.learn.results import result as result
    from labkit.learn.saying import say as say
    from labkit.learn.solutions import solution as solution

_HOMES = {
    "say": "saying",
    "result": "results",
    "predict": "predictions",
    "reveal": "predictions",
    "check": "checking",
    "CheckFailed": "checking",
    "exercise": "exercises",
    "expected": "expecting",
    "choose": "lesson_settings",
    "require": "lesson_settings",
    "hint": "hints",
    "solution": "solutions",
    "start_lesson": "lesson_times",
    "finish_lesson": "lesson_times",
    "progress_command": "progress_report",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit.learn' has no attribute {name!r}")
    return getattr(import_module(f"labkit.learn.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
