"""One picture of a sweep over one or two parameters: a panel a result (nine at most), the first along the axis."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.learn.running import LessonRun
from labkit.words import _

PANELS = 9


def numeric_results(runs: Sequence[LessonRun]) -> dict[str, str]:
    """The names of the results that are numbers in every run that has them, each with its unit."""
    units: dict[str, str] = {}
    words: set[str] = set()
    for run in runs:
        for result in run.results:
            if isinstance(result["value"], int | float) and not isinstance(result["value"], bool):
                units.setdefault(result["name"], result["unit"])
            else:
                words.add(result["name"])
    return {name: unit for name, unit in units.items() if name not in words}


def draw_sweep(runs: Sequence[LessonRun], axes: Mapping[str, Sequence[Any]], path: Path) -> str | None:
    """Draw the numeric results over the parameters that vary; returns the picture's text for who can't see it.

    None, and no picture, where more than two parameters vary, or none does, or no run has a numeric result.
    """
    varied = [name for name, values in axes.items() if len(values) > 1]
    units = numeric_results([run for run in runs if run.ok])
    if len(varied) not in (1, 2) or not units:
        return None
    from matplotlib.figure import Figure  # without pyplot: no display is asked for

    names = list(units)[:PANELS]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for panel, name in zip(grid.flat, names, strict=False):
        _draw_panel(panel, name, units[name], runs, axes, varied)
    for panel in list(grid.flat)[len(names) :]:
        panel.set_axis_off()
    lesson = runs[0].lesson
    title = _("{lesson}: what changes with {parameters}").format(lesson=lesson, parameters=_(" and ").join(varied))
    figure.suptitle(title)
    alt = _("{title}. Panels: {names}.").format(title=title, names=", ".join(names))
    figure.savefig(path, dpi=120, metadata={"Title": title, "Description": alt})
    return alt


def _draw_panel(
    panel: Any, name: str, unit: str, runs: Sequence[LessonRun], axes: Mapping[str, Sequence[Any]], varied: list[str]
) -> None:
    along, *others = varied
    # places, not values, along the axis: 1, 2, 4 or names are equally far apart
    places = {repr(value): place for place, value in enumerate(axes[along])}
    for value, marker in zip(axes[others[0]] if others else [None], itertools.cycle("osD^vP*X"), strict=False):
        chosen = [run for run in runs if run.ok and (not others or run.given[others[0]] == value)]
        points = [
            (places[repr(run.given[along])], result["value"])
            for run in chosen
            for result in run.results
            if result["name"] == name
        ]
        label = f"{others[0]}={value}" if others else None
        panel.plot([x for x, _y in points], [y for _x, y in points], marker=marker, label=label)
    panel.set_xticks(range(len(places)), [str(value) for value in axes[along]])
    panel.set_xlabel(along)
    panel.set_ylabel(unit)
    panel.set_title(name, fontsize="medium")
    panel.margins(0.1)
    panel.grid(alpha=0.3)
    if others:
        panel.legend(fontsize="small")
