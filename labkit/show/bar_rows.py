"""Bars: measured values, each beside what the formula says."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from labkit.show import theme
from labkit.show.canvas import add_legend, fill_of, formula_style, formula_swatch, network_note, new_figure, swatch
from labkit.show.picture import Picture, drawing
from labkit.show.units import amount, fitting, number
from labkit.words import _


def bars(
    values_by_label: Mapping[str, float],
    *,
    unit: str,
    title: str,
    quantity: str | None = None,
    formula: Mapping[str, float] | float | None = None,
    spread: Mapping[str, tuple[float, float]] | None = None,
    network: str | None = None,
    alt: str | None = None,
) -> Picture:
    """One bar a label, from top to bottom in the mapping's order, and under each what `formula` says of it.

    `unit` names what the numbers count; "bytes" and "seconds" are scaled to kB, MB, ..., ms, ... `quantity` says what
    is measured ("sent by each rank"), for the axis. `formula` is one number for all, or a mapping with some or all of
    the same labels. `spread` says between which two values most of what was measured lay (its quartiles), for some or
    all labels: a thin line over the bar. `network` is `record.network`, where the values come from such a record. No
    values, a value that is no finite number or below zero, a spread from high to low, or a formula or spread for a
    label that isn't there is a ValueError.
    """
    values = {str(label): float(value) for label, value in values_by_label.items()}
    if not values:
        raise ValueError("bars needs at least one value")
    if formula is None:
        predicted: dict[str, float] = {}
    elif isinstance(formula, Mapping):
        predicted = {str(label): float(value) for label, value in formula.items()}
    else:
        predicted = dict.fromkeys(values, float(formula))
    ranges = {str(label): (float(low), float(high)) for label, (low, high) in (spread or {}).items()}
    for what, labels in ((_("formula"), predicted), (_("spread"), ranges)):
        if unknown := [label for label in labels if label not in values]:
            raise ValueError(f"the {what} speaks of {', '.join(unknown)}, which is not among {', '.join(values)}")
    ends = [(label, end) for label, both in ranges.items() for end in both]
    for label, value in [*values.items(), *predicted.items(), *ends]:
        if not np.isfinite(value) or value < 0:
            raise ValueError(f"a bar is a finite number, zero or more; {label} is {value}")
    for label, (low, high) in ranges.items():
        if low > high:
            raise ValueError(f"a spread goes from low to high; that of {label} goes from {low} to {high}")
    everything = [*values.values(), *predicted.values(), *(end for _label, end in ends)]
    size, shown = fitting(everything, unit)
    top = max(*everything, 1e-300) / size
    tall = 0.42 if predicted else 0.66
    with drawing():
        height = 0.75 + (0.5 if predicted else 0.32) * len(values) + (0.25 if predicted else 0.0)
        figure, (axes,) = new_figure(title, height, network=network)
        for index, (label, value) in enumerate(values.items()):
            y = index - tall / 2 if label in predicted else index
            axes.barh(y, value / size, height=tall * 0.92, **fill_of("forward"))
            low, high = ranges.get(label, (value, value))
            if label in ranges:
                axes.hlines(y, low / size, high / size, color=theme.INK.light, linewidth=1.2)
            _number(axes, max(value, high) / size, y, number(value / size))
            if label in predicted:
                told = predicted[label]
                axes.barh(index + tall / 2, told / size, height=tall * 0.8, **formula_style())
                _number(axes, told / size, index + tall / 2, f"{number(told / size)} ({_difference(value, told)})")
        axes.set_yticks(np.arange(len(values)), list(values))
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.set_xlim(0, top * (1.3 if predicted else 1.14))
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"{quantity} ({shown})" if quantity else shown)
        if predicted:
            add_legend(figure, [swatch("forward", _("measured")), formula_swatch()])
    return Picture(figure, title, alt or _describe(values, predicted, ranges, unit, quantity, network))


def _number(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center_baseline", fontsize=theme.SMALL)


def _difference(measured: float, told: float) -> str:
    """Equal means equal, to the last byte; else how much the measurement differs from the formula."""
    if measured == told:
        return _("equal")
    if told == 0:
        return _("measured more")
    percent = (measured / told - 1) * 100
    word = _("measured {percent} % more") if percent > 0 else _("measured {percent} % less")
    return word.format(percent=number(float(f"{abs(percent):.2g}")))


def _describe(
    values: Mapping[str, float],
    predicted: Mapping[str, float],
    ranges: Mapping[str, tuple[float, float]],
    unit: str,
    quantity: str | None,
    network: str | None,
) -> str:
    text = _("Bars: {quantity}.").format(quantity=quantity or unit)
    for label, value in values.items():
        text += f" {label}: {amount(value, unit)}"
        if label in ranges:
            low, high = ranges[label]
            text += ", " + _("mostly {low} to {high}").format(low=amount(low, unit), high=amount(high, unit))
        if label in predicted:
            told = predicted[label]
            sentence = _("formula {value}, {difference}")
            text += ", " + sentence.format(value=amount(told, unit), difference=_difference(value, told))
        text += "."
    return f"{text} {network_note(network)}." if network else text
