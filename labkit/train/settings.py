"""What a field of the configuration says of itself: default, unit, help, and which values it takes."""

import difflib
from collections.abc import Iterable
from dataclasses import Field, field
from typing import Any


class ConfigError(ValueError):
    """A setting that is unknown, wrong, or contradicts another; in one sentence."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the sentence is all there is to say."""
        return [f"ConfigError: {self}"]


def setting(
    default: Any,
    help: str,
    unit: str = "",
    *,
    choices: tuple[str | int, ...] = (),
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its help. `choices` are all values there are; `least` and `above` bound it from below,
    inclusive and exclusive, `below` from above, exclusive."""
    about = {"help": help, "unit": unit, "choices": choices, "least": least, "above": above, "below": below}
    return field(default=default, metadata=about)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint with the known name that is most like `name`, "" where none is."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {found[0]}?" if found else ""


def check_value(one: "Field[Any]", kind: type, value: Any) -> Any:
    """The value in the field's type (an int will do for a float), or a ConfigError."""
    about = one.metadata
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{one.name}={value!r} must be {words_for(one, kind)}")
    if about["choices"]:
        if value not in about["choices"]:
            hint = nearest(str(value), map(str, about["choices"]))
            raise ConfigError(f"{one.name}={value} must be {words_for(one, kind)}{hint}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, above, below = about["least"], about["above"], about["below"]
        fits = (low is None or value >= low) and (above is None or value > above) and (below is None or value < below)
        if not fits:  # not a number fits nothing
            raise ConfigError(f"{one.name}={value} must be {words_for(one, kind)}")
    return value


def read_value(one: "Field[Any]", kind: type, text: str) -> Any:
    """The value that a text stands for, or a ConfigError."""
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        return check_value(one, kind, kind(text))
    except (ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{one.name}={text} must be {words_for(one, kind)}") from None


def words_for(one: "Field[Any]", kind: type) -> str:
    """Which values a field takes, in words."""
    about = one.metadata
    if about["choices"]:
        return "one of " + ", ".join(map(str, about["choices"]))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
    bounds = [("least", "at least"), ("above", "above"), ("below", "below")]
    told = [f"{word} {about[bound]:g}" for bound, word in bounds if about[bound] is not None]
    return words + (" " + " and ".join(told) if told else "")
