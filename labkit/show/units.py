"""Numbers as people read them: a unit that fits the largest value, four significant digits."""

from collections.abc import Iterable

_DECIMAL = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_BINARY = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def fitting(values: Iterable[float], unit: str, *, binary: bool = False) -> tuple[float, str]:
    """What to divide `values` by, and the unit they then have.

    "bytes" becomes kB, MB and so on (thousands; with `binary` KiB, MiB), "seconds" becomes s, ms or µs. Any other
    unit stays as it is.
    """
    steps = {"bytes": _BINARY if binary else _DECIMAL, "seconds": _TIME}.get(unit)
    if steps is None:
        return 1.0, unit
    largest = max((abs(value) for value in values if value == value), default=0.0)
    for size, name in steps:
        if largest >= size:
            return size, name
    return steps[-1]


def number(value: float) -> str:
    """`value` with four significant digits, thousands apart, no trailing zeros: 1,234, 0.1235, 12.5."""
    if value != value:
        return "?"
    if abs(value) >= 1e15 or 0 < abs(value) < 1e-4:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    rounded = float(f"{value:.4g}")
    return f"{rounded:,.6f}".rstrip("0").rstrip(".")


def amount(value: float, unit: str, *, binary: bool = False) -> str:
    """`value` with its unit, scaled on its own: `amount(1536, "bytes", binary=True)` is "1.5 KiB"."""
    size, name = fitting([value], unit, binary=binary)
    return f"{number(value / size)} {name}".rstrip()
