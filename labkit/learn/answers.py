"""What a learner types as a number: 1.5, 1,5, 3/2, 2e6, 10^6, 2*(4-1)/4, 1 000 000."""

import ast
import math
import operator
import re
from collections.abc import Callable

from labkit.words import _


class Unreadable(ValueError):
    """What was typed is no number; the message says so kindly, and how to write one."""


_LONGEST = 80
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}


def read_number(text: str, unit: str = "") -> float:
    """The number in `text`, written with a point or a comma, as a fraction, a power of ten or a small calculation.

    A leading "about" sign and the unit itself may stand with it. Anything else raises `Unreadable`.
    """
    typed = text.strip()
    if not typed:
        raise Unreadable(_("There is nothing written yet. A guess is enough, for example 1.5, 3/2 or 2e6."))
    bare = re.sub(r"^[~≈=\s]+", "", typed)
    if unit and bare.lower().endswith(unit.lower()):
        bare = bare[: -len(unit)].rstrip()
    bare = bare.translate({ord("×"): "*", ord("·"): "*", ord("−"): "-", ord("÷"): "/", ord("’"): "", ord("'"): ""})
    bare = re.sub(r"(?<=[\d.)])\s*x\s*(?=[\d(])", "*", bare).replace("^", "**")
    bare = re.sub(r"(?<=\d)[\s_\u00a0\u202f]+(?=\d)", "", bare)
    bare = re.sub(r"\d[\d.,]*", lambda number: _with_point(number.group(), typed), bare)
    bare = re.sub(r"(?<![\w.])0+(?=\d)", "", bare)
    try:
        if len(bare) > _LONGEST:
            raise ValueError
        value = _value(ast.parse(bare.strip(), mode="eval").body)
        if not math.isfinite(value):
            raise ValueError
    except (ValueError, SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError):
        raise Unreadable(_not_a_number(typed, unit)) from None
    return value


def _with_point(number: str, typed: str) -> str:
    """A number as Python writes it: commas and points told apart as decimal signs or separators of thousands."""
    comma, point = number.count(","), number.count(".")
    if not comma and point <= 1:
        return number
    if comma and point:
        thousands, decimal = (",", ".") if number.rfind(".") > number.rfind(",") else (".", ",")
        return number.replace(thousands, "").replace(decimal, ".")
    if comma + point > 1:
        return number.replace(",", "").replace(".", "")
    whole, fraction = number.split(",")
    if len(fraction) == 3 and whole.strip("0"):
        text = _("“{typed}” can be read in two ways: please write {small} or {large}. Nothing was kept.")
        raise Unreadable(text.format(typed=typed, small=f"{whole}.{fraction}", large=f"{whole}{fraction}"))
    return f"{whole}.{fraction}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError


def _not_a_number(typed: str, unit: str) -> str:
    shown = typed if len(typed) <= 30 else typed[:29] + "…"
    text = _("“{typed}” can't be read as a number. Write it like 1.5, 3/2 or 2e6. Nothing was kept.")
    if unit:
        text = _("“{typed}” can't be read as a number. Write it in {unit}, like 1.5, 3/2 or 2e6. Nothing was kept.")
    return text.format(typed=shown, unit=unit)


def write_number(value: float) -> str:
    """A number for a reader: whole numbers in full with thin spaces, others to four digits."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\u202f")
    if 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.4g}"
