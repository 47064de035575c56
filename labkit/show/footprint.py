"""Memory bars: what each rank held when it held most, by kind, beside a formula."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from labkit.record import Record
from labkit.show import theme
from labkit.show.canvas import (
    add_legend,
    fill_of,
    formula_style,
    formula_swatch,
    kind_word,
    network_note,
    new_figure,
    sentence_only,
    swatch,
)
from labkit.show.mountain import sort_kinds, stack
from labkit.show.picture import Picture, drawing
from labkit.show.units import amount, fitting, number
from labkit.words import _


def memory_bars(
    record: Record, *, title: str, formula: Mapping[str, float] | None = None, alt: str | None = None
) -> Picture:
    """The peak memory of each rank as one bar, split by kind, in KiB, MiB or GiB (powers of 1024).

    `formula` maps kinds to the bytes that a rank should hold; it is drawn as one more bar, hollow.
    """
    peaks: dict[int, dict[str, float]] = {}
    for one in record.ranks:
        if one.memory:
            _times, kinds, heights = stack(one.memory)
            most = int(heights.sum(axis=0).argmax())
            peaks[one.rank] = {kind: float(height) for kind, height in zip(kinds, heights[:, most], strict=True)}
    if not peaks:
        sentence = _("There is nothing to draw: the record holds no samples of memory.")
        with drawing():
            return Picture(sentence_only(title, sentence), title, alt or sentence)
    predicted = {kind.replace("_", " "): float(value) for kind, value in (formula or {}).items()}
    totals = [sum(peak.values()) for peak in peaks.values()]
    size, unit = fitting([*totals, sum(predicted.values())], "bytes", binary=True)
    labels = [_("rank {rank}").format(rank=rank) for rank in peaks]
    with drawing():
        count = len(peaks) + bool(predicted)
        figure, (axes,) = new_figure(title, 1.0 + 0.36 * count, network=record.network)
        for index, peak in enumerate(peaks.values()):
            _stack_bar(axes, index, peak, size, unit, hollow=False)
        if predicted:
            _stack_bar(axes, len(peaks), predicted, size, unit, hollow=True)
            labels.append(_("formula"))
        axes.set_yticks(np.arange(count), labels)
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_xlim(0, max(*totals, sum(predicted.values()), size * 1e-9) / size * 1.16)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(_("memory at the peak ({unit})").format(unit=unit))
        found = sort_kinds({kind for peak in [*peaks.values(), predicted] for kind, value in peak.items() if value})
        handles = [swatch(kind, kind_word(kind)) for kind in found]
        add_legend(figure, [*handles, formula_swatch()] if predicted else handles)
    return Picture(figure, title, alt or _describe(record, peaks, predicted))


def _stack_bar(axes: Axes, y: float, parts: Mapping[str, float], size: float, unit: str, *, hollow: bool) -> None:
    left = 0.0
    for kind in sort_kinds(set(parts)):
        width = parts[kind] / size
        if hollow:
            style = formula_style() | {"edgecolor": theme.color_of(kind)}
        else:
            style = fill_of(kind)
        axes.barh(y, width, left=left, height=0.62, **style)
        left += width
    text = f"{number(left)} {unit}"
    axes.annotate(text, (left, y), (5, 0), textcoords="offset points", va="center", fontsize=theme.SMALL)


def _describe(record: Record, peaks: Mapping[int, Mapping[str, float]], predicted: Mapping[str, float]) -> str:
    def words(parts: Mapping[str, float]) -> str:
        listed = ", ".join(
            f"{kind_word(kind)} {amount(parts[kind], 'bytes', binary=True)}" for kind in sort_kinds(set(parts))
        )
        return f"{amount(sum(parts.values()), 'bytes', binary=True)} ({listed})"

    text = _("Memory at the peak, by kind.")
    for rank, parts in peaks.items():
        text += " " + _("Rank {rank}: {parts}.").format(rank=rank, parts=words(parts))
    if predicted:
        text += " " + _("Formula: {parts}.").format(parts=words(predicted))
    return f"{text} {network_note(record.network)}." if record.network else text
