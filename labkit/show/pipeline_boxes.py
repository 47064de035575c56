"""The pipeline grid: time against rank, a box an action with its micro-batch; below, how many micro-batches are alive.

The layout is that of the figures in the papers (Huang and others, arXiv:1811.06965, figure 2), with time to scale.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from labkit.record import Record
from labkit.show import theme
from labkit.show.canvas import add_legend, fill_of, network_note, new_figure, swatch, text_width
from labkit.show.picture import Picture, drawing
from labkit.show.units import number
from labkit.words import _

_COLORS = {"F": "forward", "B": "backward", "I": "backward", "W": "step"}


class Box(NamedTuple):
    """One action: its kind F, B, I or W, its micro-batch and stage, and when it was, in seconds or any unit."""

    kind: str
    micro_batch: int
    stage: int
    start: float
    end: float


Rows = Sequence[Sequence[Box]]


def pipeline_grid(
    grids: Mapping[str, Any],
    *,
    title: str,
    unit: str = "ms",
    alive: bool = False,
    network: str | None = None,
    alt: str | None = None,
) -> Picture:
    """One grid a name, all on one scale of time: rows ranks, boxes actions, with the number of the micro-batch.

    A grid is a Simulation, a Record in which a schedule ran (its fastest step is shown, times in ms), or for each rank
    a list of Boxes in `unit`. `alive` adds a strip under the first grid: for how many micro-batches each rank keeps
    activations. A record without a pipeline in it is a ValueError.
    """
    rows_of = {name: boxes_of(grid, unit) for name, grid in grids.items()}
    if not rows_of:
        raise ValueError("a pipeline grid needs at least one grid")
    ranks = max(len(rows) for rows in rows_of.values())
    last = max(box.end for rows in rows_of.values() for row in rows for box in row)
    with drawing():
        panels = len(rows_of) + bool(alive)
        height = 0.7 + sum(0.32 + 0.3 * len(rows) for rows in rows_of.values()) + (0.9 if alive else 0.0)
        ratios = [0.35 + 0.3 * len(rows) for rows in rows_of.values()]
        ratios[1:1] = [0.95] if alive else []
        figure, axes = new_figure(
            title, height, network=network, rows=panels, sharex=True, gridspec_kw={"height_ratios": ratios}
        )
        for axis in axes:
            axis.set_xlim(0, last * 1.002 or 1)
        names = list(rows_of)
        noted = f"{names[0]}; {network_note(network)}" if network else names[0]
        _draw(axes[0], rows_of[names[0]], noted, last)
        if alive:
            _draw_alive(axes[1], rows_of[names[0]], last)
        for axis, name in zip(axes[2 if alive else 1 :], names[1:], strict=True):
            _draw(axis, rows_of[name], name, last)
        axes[-1].set_xlabel(_("time ({unit})").format(unit=unit))
        kinds = {box.kind for rows in rows_of.values() for row in rows for box in row}
        words = {
            "F": _("forward"),
            "B": _("backward"),
            "I": _("backward for inputs (I)"),
            "W": _("backward for weights (W)"),
        }
        add_legend(figure, [swatch(_COLORS[kind], words[kind]) for kind in "FBIW" if kind in kinds])
    return Picture(figure, title, alt or _describe(rows_of, ranks, unit, network))


def boxes_of(grid: Any, unit: str = "ms") -> list[list[Box]]:
    """For each rank its boxes, the first one of all at 0."""
    from labkit.parallel.pipeline import Simulation  # only here, since it imports torch

    if isinstance(grid, Simulation):
        rows = [
            [Box(*_parts(timed.action), float(timed.start), float(timed.end)) for timed in row] for row in grid.rows
        ]
    elif isinstance(grid, Record):
        rows = _fastest_step([_steps(one.events) for one in grid.ranks])
    else:
        rows = [[Box(*box) for box in row] for row in grid]
    starts = [box.start for row in rows for box in row]
    if not starts:
        raise ValueError("there is no pipeline in this record: run a schedule's step inside a Recorder")
    begin = min(starts)
    scale = 1e3 if isinstance(grid, Record) and unit == "ms" else 1.0
    return [
        [box._replace(start=scale * (box.start - begin), end=scale * (box.end - begin)) for box in row] for row in rows
    ]


def alive_over_time(row: Sequence[Box]) -> list[tuple[float, int]]:
    """When the number of micro-batches alive changes on a rank, and to what: from a forward's end to that of its
    backward (B, or W)."""
    changes = sorted((box.end, 1 if box.kind == "F" else -1) for box in row if box.kind in "FBW")
    counts, points = 0, [(0.0, 0)]
    for when, change in changes:
        counts += change
        points.append((when, counts))
    return points


def idle_share(grid: Any) -> float:
    """The share of all ranks' time, from the first action to the end of the last, in which nothing is computed."""
    rows = boxes_of(grid)
    total = max(box.end for row in rows for box in row)
    return 1 - sum(box.end - box.start for row in rows for box in row) / (total * len(rows))


def _parts(action: Any) -> tuple[str, int, int]:
    return action.kind, action.micro_batch, action.stage


def _fastest_step(steps_of: Sequence[list[list[Box]]]) -> list[list[Box]]:
    """Of the steps that all ranks have done, the one that took the shortest time over all ranks."""
    count = min((len(steps) for steps in steps_of), default=0)
    each = [[steps[number] for steps in steps_of] for number in range(count)]

    def seconds(rows: list[list[Box]]) -> float:
        return max(box.end for row in rows for box in row) - min(box.start for row in rows for box in row)

    return min(each, key=seconds) if each else []


def _steps(events: Sequence[Any]) -> list[list[Box]]:
    """A rank's boxes, step by step: one begins where the rank's first action comes again."""
    boxes = []
    for span in sorted(events, key=lambda one: one.start):
        if span.kind in ("forward", "backward") and "micro_batch" in span.details:
            kind = next(letter for letter in span.name if letter in _COLORS)
            boxes.append(Box(kind, int(span.details["micro_batch"]), int(span.details["stage"]), span.start, span.end))
    firsts = [place for place, box in enumerate(boxes) if box[:3] == boxes[0][:3]]
    return [boxes[begin:end] for begin, end in pairwise([*firsts, len(boxes)])]


def _draw(axes: Axes, rows: Rows, name: str, last: float) -> None:
    several = max(box.stage for row in rows for box in row) >= len(rows)
    gap = last / 900
    shapes: dict[str, list[Any]] = {}
    across = (theme.WIDTH - 1.2) * 72 / (last or 1)  # points a unit of time
    for rank, row in enumerate(rows):
        for box in row:
            right = max(box.start + last / 1500, box.end - gap)
            shapes.setdefault(_COLORS[box.kind], []).append(
                [
                    [box.start, rank + 0.92],
                    [box.start, rank + 0.08],
                    [right, rank + 0.08],
                    [right, rank + 0.92],
                    [box.start, rank + 0.92],
                ]
            )
            label = f"{box.micro_batch}{'abcdefgh'[box.stage // len(rows) % 8]}" if several else str(box.micro_batch)
            if (box.end - box.start) * across > text_width(label, theme.SMALL) + 3:
                color = theme.label_color_of(_COLORS[box.kind])
                ground = {"facecolor": theme.color_of(_COLORS[box.kind]), "edgecolor": "none", "pad": 0.4}
                place = ((box.start + box.end) / 2, rank + 0.5)
                style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": theme.SMALL, "zorder": 4}
                axes.text(*place, label, color=color, bbox=ground, clip_on=True, **style)
    for kind, boxes in shapes.items():
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
        axes.add_patch(PathPatch(Path(np.concatenate(boxes), codes), zorder=2, **fill_of(kind)))
    axes.set_ylim(len(rows), 0)
    axes.set_yticks(np.arange(len(rows)) + 0.5, [_("rank {rank}").format(rank=rank) for rank in range(len(rows))])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title(name)


def _draw_alive(axes: Axes, rows: Rows, last: float) -> None:
    meanings, most = theme.series_meanings([f"rank {rank}" for rank in range(len(rows))]), 1
    for rank, row in enumerate(rows):
        points = [*alive_over_time(row), (last, 0)]
        most = max(most, *(count for _when, count in points))
        times, counts = zip(*points, strict=True)
        label = _("rank {rank}").format(rank=rank)
        dashes = ["-", "--", "-.", ":"][rank % 4]
        color = theme.color_of(meanings[rank])
        axes.step(times, counts, where="post", color=color, linestyle=dashes, label=label, linewidth=1.5)
    axes.set_ylim(0, most * 1.6)
    axes.set_yticks([0, most])
    axes.set_title(_("micro-batches whose activations each rank keeps"))
    axes.legend(loc="upper right", ncols=min(4, len(rows)), fontsize=theme.SMALL - 1, handlelength=1.6)


def _describe(rows_of: Mapping[str, Rows], ranks: int, unit: str, network: str | None) -> str:
    text = _("Pipeline grid, time against {ranks} ranks.").format(ranks=ranks)
    for name, rows in rows_of.items():
        total = max(box.end for row in rows for box in row)
        peaks = [max(count for _when, count in alive_over_time(row)) for row in rows]
        sentence = _(
            "{name}: {total} {unit} in all, ranks idle {idle} % of the time, at most {peaks} micro-batches alive"
        )
        text += " " + sentence.format(
            name=name,
            total=number(total),
            unit=unit,
            idle=number(100 * idle_share(rows)),
            peaks=", ".join(map(str, peaks)),
        )
        text += "."
    return f"{text} {network_note(network)}." if network else text
