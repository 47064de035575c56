"""Memory mountains: the bytes alive of each kind over time, stacked, with the peak marked."""

from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from labkit.record import MemorySample, RankRecord, Record
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
from labkit.show.units import amount, fitting, number
from labkit.words import _

_ORDER = tuple(theme.MEMORY)  # what stays lies at the bottom, what comes and goes on top
_WORK = ("data", "forward", "backward", "step", "checkpoint")


def memory_over_time(
    record: Record, *, title: str, rank: int | None = None, by_change: bool = False, alt: str | None = None
) -> Picture:
    """The memory of one `rank`, or of each (None), by kind over milliseconds since the record's start.

    `by_change` gives every change of memory the same width, so that those show which follow each other at once. A strip
    above each mountain says what the rank was computing. Sizes are in KiB, MiB or GiB (powers of 1024). A rank that the
    record does not have is a ValueError.
    """
    chosen = [one for one in record.ranks if one.memory and rank in (None, one.rank)]
    if rank is not None and rank not in [one.rank for one in record.ranks]:
        raise ValueError(f"the record has the ranks {[one.rank for one in record.ranks]}, not {rank}")
    if not chosen:
        sentence = _("There is nothing to draw: the record holds no samples of memory here.")
        with drawing():
            return Picture(sentence_only(title, sentence), title, alt or sentence)
    start = record.start
    if by_change:
        chosen, start = [_numbered(one) for one in chosen], 0.0
    stacks = {one.rank: stack(one.memory) for one in chosen}
    top = max(float(heights.sum(axis=0).max()) for _times, _kinds, heights in stacks.values())
    size, unit = fitting([top], "bytes", binary=True)
    last = max(_end(one) for one in chosen)
    width = (last - start) * 1e3 or 1.0
    columns = 1 if len(chosen) <= 2 else 2
    rows = -(-len(chosen) // columns)
    height = 0.9 + rows * (2.4 if rows == 1 else 1.7)
    with drawing():
        options = {"rows": rows, "columns": columns, "sharex": True, "sharey": True}
        figure, axes = new_figure(title, height, network=record.network, **options)
        axes[0].set_xlim(0, width)
        axes[0].set_ylim(0, top / size * 1.35 or 1.0)
        for one, ax in zip(chosen, axes, strict=False):
            _draw(ax, (start, last), *stacks[one.rank], size)
            _draw_work(ax, start, one, width * columns)
            _mark_peak(ax, (start, last), *stacks[one.rank], size)
        for ax in axes[len(chosen) :]:
            ax.set_axis_off()
        for one, ax in zip(chosen, axes, strict=False):
            if len(record.ranks) > 1:
                ax.set_ylabel(_("rank {rank} ({unit})").format(rank=one.rank, unit=unit))
            else:
                ax.set_ylabel(_("memory ({unit})").format(unit=unit))
        for ax in axes[len(chosen) - columns : len(chosen)]:  # the lowest in each column
            ax.set_xlabel(_("changes of memory") if by_change else _("time since the start (ms)"))
            ax.tick_params(labelbottom=True)
        found = {kind for _times, kinds, _heights in stacks.values() for kind in kinds}
        add_legend(figure, [swatch(kind, kind_word(kind)) for kind in sort_kinds(found)])
    return Picture(figure, title, alt or _describe(record, stacks, start, by_change))


def sort_kinds(kinds: set[str]) -> list[str]:
    """Kinds of memory in the order in which they are stacked."""
    return sorted(kinds, key=lambda kind: (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), kind))


def stack(samples: list[MemorySample]) -> tuple[NDArray[np.float64], list[str], NDArray[np.float64]]:
    """Times (T,) in seconds, kinds (K), and the bytes alive (K, T) from each time to the next."""
    samples = sorted(samples, key=lambda sample: sample.time)
    times = np.unique([sample.time for sample in samples])
    kinds = sort_kinds({sample.kind.replace("_", " ") for sample in samples})
    heights = np.full((len(kinds), len(times)), np.nan)
    for sample in samples:
        heights[kinds.index(sample.kind.replace("_", " ")), np.searchsorted(times, sample.time)] = sample.bytes
    for row in heights:  # a kind keeps its size until its next sample, and has none before its first
        known = np.maximum.accumulate(np.where(np.isnan(row), -1, np.arange(len(row))))
        row[:] = np.where(known >= 0, row[np.maximum(known, 0)], 0.0)
    return times, kinds, heights


def _numbered(one: RankRecord) -> RankRecord:
    """The record on a clock that ticks a millisecond at each change of memory."""
    ticks = np.unique([sample.time for sample in one.memory])

    def number_of(time: float) -> float:
        return 1e-3 * float(np.searchsorted(ticks, time))

    memory = [replace(sample, time=number_of(sample.time)) for sample in one.memory]
    events = [replace(span, start=number_of(span.start), end=number_of(span.end)) for span in one.events]
    return RankRecord(one.rank, events=events, memory=memory)


def _end(one: RankRecord) -> float:
    return max([sample.time for sample in one.memory] + [span.end for span in one.events])


def _draw(
    ax: Axes,
    ends: tuple[float, float],
    times: NDArray[np.float64],
    kinds: list[str],
    heights: NDArray[np.float64],
    size: float,
) -> None:
    moments = (np.append(times, ends[1]) - ends[0]) * 1e3
    below = np.zeros(len(moments))
    for kind, row in zip(kinds, heights, strict=True):
        above = below + np.append(row, row[-1]) / size
        ax.fill_between(moments, below, above, step="post", **fill_of(kind))
        below = above


def _draw_work(ax: Axes, start: float, one: RankRecord, width: float) -> None:
    """A strip at the top that says what was computed; spans of a kind that follow each other are one piece."""
    pieces: list[tuple[str, float, float]] = []
    for span in sorted((s for s in one.events if s.kind in _WORK), key=lambda s: s.start):
        left, right = (span.start - start) * 1e3, (span.end - start) * 1e3
        if pieces and pieces[-1][0] == span.kind and left - pieces[-1][2] < width / 200:
            left = pieces.pop()[1]
        pieces.append((span.kind, left, right))
    points = (theme.WIDTH - 1.2) * 72 / width
    low, high = 0.91, 1.0
    for kind in _WORK:
        bars = [(left, right - left) for each, left, right in pieces if each == kind]
        fill = fill_of(kind) | {"hatch": None}
        ax.broken_barh(bars, (low, high - low), transform=ax.get_xaxis_transform(), **fill)
    for kind, left, right in pieces:
        word = kind_word(kind)
        if (right - left) * points > text_width(word, theme.SMALL) + 6:
            place = ((left + right) / 2, (low + high) / 2)
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": theme.SMALL}
            ax.text(*place, word, color=theme.label_color_of(kind), transform=ax.get_xaxis_transform(), **style)


def _mark_peak(
    ax: Axes,
    ends: tuple[float, float],
    times: NDArray[np.float64],
    kinds: list[str],
    heights: NDArray[np.float64],
    size: float,
) -> None:
    totals = heights.sum(axis=0)
    index = int(totals.argmax())
    x, y = (times[index] - ends[0]) * 1e3, totals[index] / size
    ax.plot([x], [y], marker="v", color=theme.INK.light, markersize=6, clip_on=False)
    text = _("peak {bytes}").format(bytes=amount(totals[index], "bytes", binary=True))
    side = "left" if x < (ends[1] - ends[0]) * 1e3 / 2 else "right"
    ax.annotate(text, (x, y), (6 if side == "left" else -6, 6), textcoords="offset points", ha=side)


def _describe(
    record: Record,
    stacks: dict[int, tuple[NDArray[np.float64], list[str], NDArray[np.float64]]],
    start: float,
    by_change: bool,
) -> str:
    text = _("Memory, change by change.") if by_change else _("Memory over time.")
    peaks = (
        _("Rank {rank} peaks at {bytes} after {time} changes: {parts}.")
        if by_change
        else _("Rank {rank} peaks at {bytes} after {time} ms: {parts}.")
    )
    for rank, (times, kinds, heights) in stacks.items():
        index = int(heights.sum(axis=0).argmax())
        parts = ", ".join(
            f"{kind_word(kind)} {amount(heights[row, index], 'bytes', binary=True)}" for row, kind in enumerate(kinds)
        )
        text += " " + peaks.format(
            rank=rank,
            bytes=amount(float(heights[:, index].sum()), "bytes", binary=True),
            time=number((times[index] - start) * 1e3),
            parts=parts,
        )
    return f"{text} {network_note(record.network)}." if record.network else text
