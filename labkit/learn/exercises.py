"""The exercises of the lessons: what each asks, how an answer is tried, and which plausible answers are wrong.

Each lesson registers its own in a module of `labkit.learn.catalog`, which is imported when an exercise is looked up.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.learn.properties import Property
from labkit.learn.surroundings import show_text
from labkit.words import _

DOTS = ("●○○", "●●○", "●●●")


def no_inputs(rank: int, world_size: int) -> tuple[Any, ...]:
    """The inputs of a trial whose `drive` makes its own."""
    return ()


def call(function: Callable[..., Any], *inputs: Any) -> Any:
    """The plainest way to drive an answer: call it once."""
    return function(*inputs)


@dataclass(frozen=True)
class Trial:
    """One case in which an answer is tried, on `world_size` ranks.

    On each rank `drive(function, *inputs(rank, world_size))` runs the answer and returns what the properties judge. All
    three must be importable, and the inputs the same whenever they are made. `drive` raises `Nonsense` where the answer
    returned something of another type or shape than was asked for.
    """

    label: str
    world_size: int = 1
    inputs: Callable[[int, int], tuple[Any, ...]] = no_inputs
    drive: Callable[..., Any] = call
    input_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrongAnswer:
    """A plausible answer that is wrong: the first property that rejects it, and words of the cause that is named."""

    name: str
    function: Callable[..., Any]
    fails: str
    cause: str


@dataclass(frozen=True)
class Exercise:
    """An exercise of a lesson.

    `dots` is its difficulty from 1 to 3, `minutes` how long it takes most people. The stub and the solution stand in
    the cell `cell` of the lesson's notebook; the solution defines `answer`. `seconds` bounds all trials together.
    """

    id: str
    lesson: str
    title: str
    dots: int
    minutes: int
    answer: str
    hints: tuple[str, ...]
    properties: tuple[Property, ...]
    trials: tuple[Trial, ...]
    wrong_answers: tuple[WrongAnswer, ...]
    cell: str = ""
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if not 1 <= self.dots <= len(DOTS):
            raise ValueError(f"exercise {self.id!r}: its difficulty is 1, 2 or 3 dots, not {self.dots!r}")
        if len(self.wrong_answers) < 3:
            raise ValueError(f"exercise {self.id!r}: three or more wrong answers must be published with it")
        if not (self.hints and self.properties and self.trials):
            raise ValueError(f"exercise {self.id!r}: it needs hints, properties and trials")

    @property
    def cell_id(self) -> str:
        """The id of the notebook cell with the stub and the solution: the exercise's own unless given."""
        return self.cell or self.id

    @property
    def heading(self) -> str:
        """Title, difficulty and minutes in one line."""
        text = _("{title} (difficulty {dots}, about {minutes} minutes)")
        return text.format(title=_(self.title), dots=DOTS[self.dots - 1], minutes=self.minutes)


class UnknownExercise(LookupError):
    """There is no exercise of that name; the message says which ones are near."""


_exercises: dict[str, Exercise] = {}


def register(exercise: Exercise) -> Exercise:
    """Make an exercise known. Two of one id are refused with a ValueError."""
    other = _exercises.get(exercise.id)
    if other is not None and other is not exercise:
        raise ValueError(
            f"exercise {exercise.id!r} is registered twice, in lessons {other.lesson} and {exercise.lesson}"
        )
    _exercises[exercise.id] = exercise
    return exercise


def every_exercise() -> list[Exercise]:
    """All exercises, in order of their lessons."""
    from labkit.learn import catalog

    for module in pkgutil.iter_modules(catalog.__path__):
        importlib.import_module(f"{catalog.__name__}.{module.name}")
    return sorted(_exercises.values(), key=lambda one: one.lesson)


def find_exercise(exercise_id: str) -> Exercise:
    """The exercise of that id; raises UnknownExercise with the nearest names."""
    known = {one.id: one for one in every_exercise()}
    if exercise_id not in known:
        near = difflib.get_close_matches(str(exercise_id), known, n=1)
        text = _("There is no exercise “{name}”.").format(name=exercise_id)
        remedy = _("Did you mean “{near}”?").format(near=near[0]) if near else ", ".join(known)
        raise UnknownExercise(f"{text} {remedy}")
    return known[exercise_id]


def exercise(exercise_id: str) -> None:
    """Show an exercise's title, difficulty and minutes, as `exercise("shares")`."""
    show_text(f"**{_('Exercise')}.** {find_exercise(exercise_id).heading}")
