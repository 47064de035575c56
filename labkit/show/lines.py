"""Curves: series over a common axis, measured solid with markers, predicted dashed in the same colour."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from labkit.show import theme
from labkit.show.canvas import add_legend, network_note, new_figure
from labkit.show.picture import Picture, drawing
from labkit.show.units import amount, fitting
from labkit.words import _

_MANY = 24  # from so many points on, only some carry a marker


def curves(
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    unit: str,
    x_unit: str = "",
    predicted: Mapping[str, Sequence[float | None]] | None = None,
    log: Literal["", "x", "y", "xy"] = "",
    network: str | None = None,
    alt: str | None = None,
) -> Picture:
    """Lines of `series` over `x`, one colour and marker each; None or nan leaves a gap.

    `predicted` holds what a formula says, dashed: under the name of a series in its colour, under another name in one
    of its own. `unit` is that of the values, "" for a pure number; "bytes" and "seconds" are scaled to fit, on `x_unit`
    too. `log` names the axes that are logarithmic. `network` is `record.network`, where the values come from such a
    record. Lengths that differ, no finite value, or a value of zero or less on a logarithmic axis is a ValueError.
    """
    positions = np.asarray(x, dtype=np.float64)
    measured = {name: _numbers(name, values, positions, "y" in log) for name, values in series.items()}
    formulas = {name: _numbers(name, values, positions, "y" in log) for name, values in (predicted or {}).items()}
    everything = [*measured.values(), *formulas.values()]
    if not everything or not np.isfinite(np.concatenate(everything)).any():
        raise ValueError("curves needs at least one series with a finite value")
    if not np.isfinite(positions).all() or ("x" in log and (positions <= 0).any()):
        raise ValueError("curves needs finite x, above zero where the axis is logarithmic")
    # one unit for a linear axis; on a logarithmic one, which spans many, each tick has its own
    x_size, x_shown = (1.0, "") if "x" in log else fitting(positions, x_unit)
    size, shown = (1.0, "") if "y" in log else fitting(np.concatenate(everything), unit)
    names = list(dict.fromkeys([*measured, *formulas]))
    colors = [theme.color_of(meaning) for meaning in theme.series_meanings(names)]
    looks = {name: (colors[i], theme.MARKERS[i % len(theme.MARKERS)]) for i, name in enumerate(names)}
    x_values = positions / x_size
    with drawing():
        figure, (axes,) = new_figure(title, 3.4, network=network)
        handles = []
        for name in names:
            color, marker = looks[name]
            if name in measured:
                often = 1 if len(positions) <= _MANY else len(positions) // 12
                solid: dict[str, Any] = {"color": color, "marker": marker}
                axes.plot(x_values, measured[name] / size, markevery=often, **solid)
                handles.append(Line2D([], [], label=name, **solid))
            if name in formulas:
                dashed: dict[str, Any] = {"color": color, "linestyle": (0, (4, 2))}
                axes.plot(x_values, formulas[name] / size, **dashed)
                handles.append(Line2D([], [], label=_("{name}, predicted").format(name=name), **dashed))
        axes.set_xlabel(f"{x_label} ({x_shown})" if x_shown else x_label)
        axes.set_ylabel(f"{y_label} ({shown})" if shown else y_label)
        axes.grid(visible=True, axis="y")
        _scale(axes, log, x_values, x_unit if "x" in log else "", unit if "y" in log else "")
        add_legend(figure, handles)
    lines = list(measured.items())
    lines += [(_("{name}, predicted").format(name=name), values) for name, values in formulas.items()]
    return Picture(figure, title, alt or _describe(positions, x_label, x_unit, lines, y_label, unit, network))


def _numbers(name: str, values: Sequence[float | None], x: NDArray[np.float64], log: bool) -> NDArray[np.float64]:
    numbers = np.array([np.nan if value is None else float(value) for value in values], dtype=np.float64)
    if numbers.shape != x.shape:
        raise ValueError(
            f"{name!r} has {len(numbers)} values for {len(x)} places on x; give one for each, None for none"
        )
    if log and (numbers <= 0).any():
        raise ValueError(f"{name!r} has a value of zero or less, which a logarithmic axis can't show")
    return np.where(np.isinf(numbers), np.nan, numbers)


def _scale(axes: Axes, log: str, x: NDArray[np.float64], x_unit: str, unit: str) -> None:
    places = np.unique(x)
    powers = bool((places > 0).all() and (np.log2(np.maximum(places, 1e-300)) % 1 == 0).all())
    if "x" in log:
        axes.set_xscale("log", base=2 if powers else 10)
    if "y" in log:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: amount(value, x_unit)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: amount(value, unit)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    roomy = len(places) < 2 or np.diff(places).min() >= np.ptp(places) / 16
    if len(places) <= 12 and (powers if "x" in log else roomy):  # the places themselves say more than round numbers
        axes.set_xticks(places)


def _describe(
    x: NDArray[np.float64],
    x_label: str,
    x_unit: str,
    lines: list[tuple[str, NDArray[np.float64]]],
    y_label: str,
    unit: str,
    network: str | None,
) -> str:
    text = _("Curves of {y} over {x}.").format(y=y_label, x=x_label)
    for name, values in lines:
        known = np.flatnonzero(np.isfinite(values))
        if not len(known):
            text += " " + _("{name}: no values.").format(name=name)
            continue
        sentence = _("{name}: {first} at {x_first}, {last} at {x_last}; least {low}, most {high}.")
        text += " " + sentence.format(
            name=name,
            first=amount(values[known[0]], unit),
            x_first=amount(x[known[0]], x_unit),
            last=amount(values[known[-1]], unit),
            x_last=amount(x[known[-1]], x_unit),
            low=amount(values[known].min(), unit),
            high=amount(values[known].max(), unit),
        )
    return f"{text} {network_note(network)}." if network else text
