"""Values for a lesson's parameters, from `key=value` on the command line or from a dictionary, checked before a run.

papermill takes an unknown key with no more than a log message and checks no types, so a slip would run the lesson
with its defaults.
"""

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from labkit.learn.lessons import Lesson, LessonError, Parameter
from labkit.words import _

Value = Any


def _integer(text: str) -> int:
    return int(text)


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_READERS: dict[str, Callable[[str], Value]] = {"int": _integer, "float": float, "bool": _truth, "str": str}
_PYTHON_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


def describe(parameter: Parameter) -> str:
    return f"{parameter.name} ({parameter.type})"


def find_parameter(lesson: Lesson, name: str) -> Parameter:
    """The lesson's parameter of that name; a LessonError names the known ones with their types."""
    for parameter in lesson.parameters:
        if parameter.name == name:
            return parameter
    known = ", ".join(describe(parameter) for parameter in lesson.parameters) or _("none")
    message = _("{lesson} has no parameter {name}; it has: {known}.")
    raise LessonError(message.format(lesson=lesson.name, name=repr(name), known=known))


def _refuse(lesson: Lesson, parameter: Parameter, given: str) -> LessonError:
    message = _("The parameter {name} of {lesson} takes {type}, as in {name}={default}; {given} is none.")
    default = parameter.default if isinstance(parameter.default, str) else repr(parameter.default)
    return LessonError(
        message.format(name=parameter.name, lesson=lesson.name, type=parameter.type, default=default, given=repr(given))
    )


def read_value(lesson: Lesson, parameter: Parameter, text: str) -> Value:
    """One value of the parameter's type from text."""
    reader = _READERS.get(parameter.type)
    try:
        if reader is not None:
            return reader(text)
        value = ast.literal_eval(text)
    except (ValueError, KeyError, SyntaxError):
        raise _refuse(lesson, parameter, text) from None
    if parameter.default is not None and not isinstance(value, type(parameter.default)):
        raise _refuse(lesson, parameter, text)
    return value


def check_values(lesson: Lesson, values: Mapping[str, Value]) -> dict[str, Value]:
    """The values, each of a known name and of its type; an int will do for a float."""
    checked = {}
    for name, value in values.items():
        parameter = find_parameter(lesson, name)
        kind = _PYTHON_TYPES.get(parameter.type)
        if kind is float and type(value) is int:
            value = float(value)
        if kind is not None and type(value) is not kind:
            raise _refuse(lesson, parameter, str(value))
        checked[name] = value
    return checked


def _split(lesson: Lesson, assignment: str) -> tuple[Parameter, str]:
    name, equals, text = assignment.partition("=")
    if not equals:
        message = _("A parameter is given as key=value, as in world_size=2, not as {given}.")
        raise LessonError(message.format(given=repr(assignment)))
    return find_parameter(lesson, name.strip()), text


def _once(lesson: Lesson, assignments: Iterable[str]) -> list[tuple[Parameter, str]]:
    found = [_split(lesson, assignment) for assignment in assignments]
    names = [parameter.name for parameter, _text in found]
    for name in names:
        if names.count(name) > 1:
            raise LessonError(_("The parameter {name} is given twice; give it once.").format(name=name))
    return found


def read_assignments(lesson: Lesson, assignments: Iterable[str]) -> dict[str, Value]:
    """`["world_size=2", ...]` as values."""
    return {parameter.name: read_value(lesson, parameter, text) for parameter, text in _once(lesson, assignments)}


def read_axes(lesson: Lesson, assignments: Iterable[str]) -> dict[str, list[Value]]:
    """`["world_size=1,2,4", ...]` as lists of values, for a sweep. Lists are separated by commas too: `[1,2],[3]`."""
    axes = {}
    for parameter, text in _once(lesson, assignments):
        if parameter.type in _READERS:
            parts = text.split(",")
        else:
            try:
                parts = [repr(part) for part in ast.literal_eval(f"({text},)")]
            except (ValueError, SyntaxError):
                raise _refuse(lesson, parameter, text) from None
        values = [read_value(lesson, parameter, part) for part in parts]
        axes[parameter.name] = [value for index, value in enumerate(values) if value not in values[:index]]
    return axes


def all_values(lesson: Lesson, given: Mapping[str, Value]) -> dict[str, Value]:
    """The given values over the lesson's defaults."""
    return {parameter.name: given.get(parameter.name, parameter.default) for parameter in lesson.parameters}


def alternate_values(lesson: Lesson) -> list[dict[str, Value]]:
    """Further sets of parameters that the lesson must run with: its own list, else other ranks and another seed."""
    if lesson.alternates is not None:
        return [check_values(lesson, values) for values in lesson.alternates]
    known = {parameter.name for parameter in lesson.parameters}
    sets = ({"world_size": 3, "seed": 1}, {"world_size": 1})
    return [kept for values in sets if (kept := {name: value for name, value in values.items() if name in known})]
