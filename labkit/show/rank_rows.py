"""Rank lanes: what each rank did, when; compute above, communication below, since the two may overlap.

The layout is that of a Gantt chart, one row a rank, as trace viewers draw it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from numpy.typing import NDArray

from labkit.record import KINDS, Record, Span
from labkit.show import theme
from labkit.show.canvas import (
    add_legend,
    fill_of,
    kind_word,
    network_note,
    new_figure,
    sentence_only,
    swatch,
    text_width,
)
from labkit.show.picture import Picture, drawing
from labkit.show.units import number
from labkit.words import _

_TALK = ("communication", "wait")
_SHRINK = 0.28  # how much lower a span is than the one that it lies on
_THIN = 1 / 1500  # of the width: what is shorter is drawn about a pixel wide, else it would vanish
_GAP = 1 / 700  # of the width: between spans that touch


def lanes(
    record: Record,
    *,
    title: str,
    ranks: Sequence[int] | None = None,
    between: tuple[float, float] | None = None,
    alt: str | None = None,
) -> Picture:
    """One row a rank, one bar a span, coloured by kind, over milliseconds since the record's start.

    `ranks` chooses ranks, `between` a window in milliseconds. Spans that lie on others are drawn lower. Where a record
    has no communication there is one lane a rank. A rank that the record does not have is a ValueError.
    """
    start = record.start
    chosen = _rows(record, ranks)
    spans = {rank: _visible(start, events, between) for rank, events in chosen.items()}
    if not any(spans.values()):
        sentence = _(
            "There is nothing to draw: the record holds no spans here. Run what you want to see inside a Recorder."
        )
        with drawing():
            return Picture(sentence_only(title, sentence), title, alt or sentence)
    talking = any(span.kind in _TALK for row in spans.values() for span in row)
    window = between or (0.0, max((span.end - start) * 1e3 for row in spans.values() for span in row) or 1.0)
    with drawing():
        row = (0.6 if len(spans) <= 6 else 0.36) * (1.0 if talking else 0.7)
        figure, (axes,) = new_figure(title, 0.95 + row * len(spans), network=record.network)
        axes.set_xlim(window)
        axes.set_ylim(len(spans), 0)
        for index, events in enumerate(spans.values()):
            if talking:
                _draw_lane(
                    _Lane(axes, start, window, index + 0.06, 0.44, row), [s for s in events if s.kind not in _TALK]
                )
                _draw_lane(_Lane(axes, start, window, index + 0.52, 0.42, row), [s for s in events if s.kind in _TALK])
            else:
                _draw_lane(_Lane(axes, start, window, index + 0.1, 0.8, row), events)
        axes.hlines(range(1, len(spans)), *window, color=theme.GRID.light, linewidth=0.8, zorder=0)
        axes.set_yticks(np.arange(len(spans)) + 0.5, [_("rank {rank}").format(rank=rank) for rank in spans])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(_("time since the start (ms)"))
        present = {_kind(span) for events in spans.values() for span in events}
        add_legend(figure, [swatch(kind, kind_word(kind)) for kind in KINDS if kind in present])
    return Picture(figure, title, alt or _describe(record, spans, window))


def _rows(record: Record, ranks: Sequence[int] | None) -> dict[int, list[Span]]:
    known = {one.rank: one.events for one in record.ranks}
    if ranks is None:
        return known
    for rank in ranks:
        if rank not in known:
            raise ValueError(f"the record has the ranks {sorted(known)}, not {rank}; leave ranks out to see all")
    return {rank: known[rank] for rank in ranks}


def _visible(start: float, events: Iterable[Span], between: tuple[float, float] | None) -> list[Span]:
    if between is None:
        return list(events)
    if not between[0] < between[1]:
        raise ValueError(f"between=(from, to) is in milliseconds, from before to; got {between}")
    low, high = (start + ms / 1e3 for ms in between)
    return [span for span in events if span.end > low and span.start < high]


def _kind(span: Span) -> str:
    return span.kind if span.kind in KINDS else "other"


class _Lane(NamedTuple):
    """Where spans are drawn: from `start` seconds, the window in ms, top and height in rows of `row` inches."""

    axes: Axes
    start: float
    window: tuple[float, float]
    top: float
    height: float
    row: float

    def upper(self, depth: int) -> float:
        return self.top + self.height * _SHRINK * depth

    def ends(self, span: Span) -> tuple[float, float]:
        return (span.start - self.start) * 1e3, (span.end - self.start) * 1e3


def _draw_lane(lane: _Lane, spans: list[Span]) -> None:
    """One patch for each kind and depth, however many spans there are: thousands stay quick and small."""
    width = lane.window[1] - lane.window[0]
    shapes: dict[tuple[str, int], list[NDArray[np.float64]]] = {}
    depths = _depths(spans)
    for span, depth in zip(spans, depths, strict=True):
        left, right = lane.ends(span)
        right = max(right - min(width * _GAP, (right - left) * 0.2), left + width * _THIN)
        low, high = lane.top + lane.height, lane.upper(depth)
        box = np.array([[left, low], [left, high], [right, high], [right, low], [left, low]])
        shapes.setdefault((_kind(span), depth), []).append(box)
    for (kind, depth), boxes in shapes.items():
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
        lane.axes.add_patch(PathPatch(Path(np.concatenate(boxes), codes), zorder=2 + depth, **fill_of(kind, 3)))
    _write_names(lane, spans, depths)


def _depths(spans: list[Span]) -> list[int]:
    """For each span on how many others it lies, 2 at most: the lowest depth that is free when it starts."""
    depths = [0] * len(spans)
    ends: list[float] = []
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, -spans[i].end)):
        span = spans[index]
        depth = next((d for d, end in enumerate(ends) if end <= span.start), len(ends))
        ends[depth : depth + 1] = [span.end]
        depths[index] = min(depth, 2)
    return depths


def _covered(spans: list[Span], depths: list[int]) -> list[bool]:
    """For each span whether another lies on it."""
    covered = [False] * len(spans)
    below: list[int] = []  # for each depth the span drawn last
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, depths[i])):
        depth = depths[index]
        for other in below[:depth]:
            covered[other] |= spans[other].end > spans[index].start
        below[depth:] = [index]
    return covered


def _write_names(lane: _Lane, spans: list[Span], depths: list[int]) -> None:
    """Names inside the spans that have room for them and nothing lying on them."""
    across = (theme.WIDTH - 0.9) * 72 / (lane.window[1] - lane.window[0])  # points a millisecond
    for span, depth, hidden in zip(spans, depths, _covered(spans, depths), strict=True):
        low, high = (min(max(end, lane.window[0]), lane.window[1]) for end in lane.ends(span))
        upper, lower = lane.upper(depth), lane.top + lane.height
        tall, room = (lower - upper) * lane.row * 72, (high - low) * across - 8
        if hidden or tall < theme.SMALL * 1.3 or room < len(span.name) * theme.SMALL * 0.25:  # even if it were all i's
            continue
        if room < text_width(span.name, theme.SMALL):
            continue
        kind = _kind(span)
        style: dict[str, Any] = {
            "ha": "center",
            "va": "center_baseline",
            "fontsize": theme.SMALL,
            "zorder": 6,
            "clip_on": True,
        }
        ground = {"facecolor": theme.color_of(kind), "edgecolor": "none", "pad": 0.5}  # hides the hatch
        place = ((low + high) / 2, (upper + lower) / 2)
        lane.axes.text(*place, span.name, color=theme.label_color_of(kind), bbox=ground, **style)


def _describe(record: Record, spans: dict[int, list[Span]], window: tuple[float, float]) -> str:
    """What the lanes show, in words: how long each kind took on each rank, or from least to most for many ranks."""
    (low, high), start = window, record.start
    text = _("Rank lanes, {count} in all, from {low} to {high} ms.").format(
        count=len(spans), low=number(low), high=number(high)
    )
    totals: dict[int, dict[str, float]] = {rank: {} for rank in spans}
    for rank, events in spans.items():
        for span in events:
            inside = min((span.end - start) * 1e3, high) - max((span.start - start) * 1e3, low)
            totals[rank][_kind(span)] = totals[rank].get(_kind(span), 0.0) + inside
    if len(spans) <= 4:
        for rank, kinds in totals.items():
            parts = ", ".join(f"{kind_word(kind)} {number(kinds[kind])} ms" for kind in KINDS if kind in kinds)
            text += " " + _("Rank {rank}: {parts}.").format(rank=rank, parts=parts or _("nothing"))
    else:
        for kind in KINDS:
            values = [kinds.get(kind, 0.0) for kinds in totals.values()]
            if any(values):
                least, most = number(min(values)), number(max(values))
                text += " " + _("Each rank, {kind}: {least} to {most} ms.").format(
                    kind=kind_word(kind), least=least, most=most
                )
    return f"{text} {network_note(record.network)}." if record.network else text
