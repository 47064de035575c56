"""The lessons as files: which there are, and what each says of itself (title, minutes, needs, parameters).

A lesson is `notebooks/NN-slug.ipynb`. Its metadata carry, under the key `labkit`:
{"lesson": "00", "title": ..., "minutes": {"quick": ..., "lab": ...}, "needs": ["01"], "alternate": [{...}]}.
`alternate` lists further sets of parameters that the lesson must run with.
"""

import ast
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import labkit
from labkit.words import _

ROOT = Path(labkit.__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
LESSON_FILE = re.compile(r"\d\d-[a-z0-9]+(-[a-z0-9]+)*\.ipynb")


class LessonError(ValueError):
    """What was asked of a lesson can't be done; the message is one sentence for the reader."""


@dataclass(frozen=True)
class Parameter:
    """One line of the cell tagged `parameters`: `name: type = default  # help`."""

    name: str
    type: str
    default: Any
    help: str


@dataclass(frozen=True)
class Lesson:
    """One notebook; its parameters are read when they are first asked for."""

    path: Path
    number: str
    title: str
    minutes: dict[str, float]
    needs: tuple[str, ...]
    alternates: tuple[dict[str, Any], ...] | None

    @property
    def name(self) -> str:
        """As on the command line and in tables: `00-start-here`."""
        return self.path.stem

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        import papermill  # takes a second to import

        found = papermill.inspect_notebook(self.path)
        return tuple(
            Parameter(name, about["inferred_type_name"], _literal(self, name, about["default"]), about["help"])
            for name, about in found.items()
        )


def _literal(lesson: Lesson, name: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        message = _("The parameter {name} of {lesson} is not a plain value: {text}.")
        raise LessonError(message.format(name=name, lesson=lesson.name, text=text)) from None


def read_lesson(path: Path) -> Lesson:
    """What the notebook at `path` says of itself."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        about = notebook["metadata"].get("labkit", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LessonError(_("{path} can't be read as a notebook: {error}.").format(path=path, error=error)) from error
    alternates = about.get("alternate")
    return Lesson(
        path=path.resolve(),
        number=about.get("lesson", path.stem[:2]),
        title=about.get("title", path.stem),
        minutes=about.get("minutes", {}),
        needs=tuple(about.get("needs", ())),
        alternates=None if alternates is None else tuple(alternates),
    )


def all_lessons(folder: Path = NOTEBOOKS) -> list[Lesson]:
    """Every lesson of a folder, in order. Other notebooks there are no lessons."""
    return [read_lesson(path) for path in sorted(folder.glob("*.ipynb")) if LESSON_FILE.fullmatch(path.name)]


def find_lesson(asked: str, folder: Path = NOTEBOOKS) -> Lesson:
    """The lesson meant by `asked`: its number, its name, or the path of any notebook. Raises LessonError."""
    if asked.endswith(".ipynb") and Path(asked).is_file():
        return read_lesson(Path(asked))
    lessons = all_lessons(folder)
    for lesson in lessons:
        if asked in (lesson.number, lesson.name, lesson.path.name):
            return lesson
    known = ", ".join(lesson.name for lesson in lessons) or _("none")
    raise LessonError(_("There is no lesson {asked}; there are: {known}.").format(asked=repr(asked), known=known))
