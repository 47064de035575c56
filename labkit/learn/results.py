"""Machine-readable results: `result` puts a number with its name and unit into a cell's output.

The runner of lessons collects these outputs from executed notebooks into one table.
"""

import json
import math
import re
from typing import Any

from labkit.learn.surroundings import show

MIME = "application/vnd.labkit.result+json"
VERDICTS = ("holds", "holds when ...", "does not hold here", "not testable here")
_NAME = re.compile(r"(claim/)?[a-z0-9]+(-[a-z0-9]+)*")

Value = float | int | str | bool


def result(name: str, value: Any, unit: str) -> None:
    """Emit one result of the lesson, as `result("ring-bytes", 1.5, "x tensor")`.

    `name` is a slug (lower-case letters, digits, single hyphens). `value` is one number, text or truth value; scalar
    tensors and arrays are converted, and a number that JSON can't say becomes the text "nan", "inf" or "-inf". The
    verdict on a claim is `result("claim/<id>", verdict, "")`, where the verdict is one of `VERDICTS` with the condition
    written out. A ValueError or TypeError says what is wrong.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"result: {name!r} is no name for a result; use lower-case letters, digits and hyphens, "
            f"as in 'ring-bytes', or 'claim/<id>' for the verdict on a claim"
        )
    if not isinstance(unit, str):
        raise TypeError(f"result {name!r}: the unit is text such as 'bytes', or '' where there is none, not {unit!r}")
    plain = plain_value(name, value)
    if name.startswith("claim/"):
        _check_verdict(name, plain, unit)
    content = {"name": name, "value": plain, "unit": unit}
    show({MIME: content, "text/plain": f"{name} = {_shown(plain)}{' ' + unit if unit else ''}"})


def plain_value(name: str, value: Any) -> Value:
    """The value as JSON can carry it; a TypeError where it is more, or other, than one number, text or truth value."""
    if not isinstance(value, (str, bool, int, float)) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            shape = tuple(getattr(value, "shape", ()))
            raise TypeError(f"result {name!r}: a value of shape {shape} is not one number; reduce it first") from None
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, bool) or type(value) in (str, int, float):
        return value  # type: ignore[no-any-return]
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        pass
    else:
        if isinstance(value, (str, int, float)):  # an enumeration, or another kind of number
            return value
    kind = type(value).__name__
    raise TypeError(f"result {name!r}: the value must be one number, text or truth value, not a {kind}")


def _check_verdict(name: str, value: Value, unit: str) -> None:
    known = value in ("holds", "does not hold here", "not testable here")
    condition = isinstance(value, str) and value.removeprefix("holds when ") not in (value, "", "...")
    if not (known or condition):
        raise ValueError(f"result {name!r}: the verdict is one of {', '.join(map(repr, VERDICTS))}, not {value!r}")
    if unit:
        raise ValueError(f"result {name!r}: a verdict has no unit; write result({name!r}, {value!r}, '')")


def _shown(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
