"""What every picture has: a figure of the notebook's width, its title, the note of an emulated network, a legend."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path

from labkit.show import theme
from labkit.words import _

_PAPER_POINTS = theme.WIDTH * 72
_LEGEND_POINTS = 44  # a swatch and the gaps around it


def new_figure(
    title: str, height: float, *, network: str | None = None, rows: int = 1, columns: int = 1, **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with its title and `rows` times `columns` axes; `height` inches hold all but the title."""
    if not isinstance(title, str) or not title.strip():
        raise ValueError(f"a picture needs title, a sentence that states its message; got {title!r}")
    lines = wrapped(title, theme.TITLE, bold=True)
    height += 0.22 * len(lines) + (0.2 if network else 0.0)
    figure = Figure(figsize=(theme.WIDTH, round(height, 2)), layout="constrained")
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=theme.TITLE, fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False, **subplots)
    axes = list(np.ravel(grid))
    if network:
        axes[0].set_title(network_note(network), fontstyle="italic")
    return figure, axes


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """The width of `text` in points."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def wrapped(text: str, size: float, *, bold: bool = False) -> list[str]:
    """`text` in lines that fit the figure. A word too long for a line is cut."""
    room = _PAPER_POINTS * 0.97
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size, bold=bold) <= room:
            lines[-1] = longer
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = word
        while text_width(lines[-1], size, bold=bold) > room:
            fit = next(n for n in range(len(lines[-1]), 0, -1) if text_width(lines[-1][:n], size, bold=bold) <= room)
            lines[-1:] = [lines[-1][:fit], lines[-1][fit:]]
    return lines


def network_note(network: str) -> str:
    """The words that stand wherever a network was emulated."""
    return _("emulated network: {network}").format(network=network)


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """A legend under the axes, in as many columns as fit; none where there is nothing to explain."""
    if not handles:
        return
    widest = max(text_width(str(handle.get_label()), theme.SMALL) for handle in handles)
    columns = max(1, min(len(handles), int(_PAPER_POINTS / (widest + _LEGEND_POINTS))))
    rows = -(-len(handles) // columns)
    columns = -(-len(handles) // rows)
    # matplotlib fills column by column; a reader goes row by row
    handles = [handle for column in range(columns) for handle in handles[column::columns]]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=1.8, columnspacing=1.4)


def swatch(kind: str, label: str) -> Patch:
    """A legend entry in the colour and hatch of `kind`."""
    return Patch(label=label, **fill_of(kind, 3))


def fill_of(kind: str, density: int = 2) -> dict[str, Any]:
    """How a shape of this kind is filled. The hatch has the colour of the paper, the shape has no outline."""
    return {
        "facecolor": theme.color_of(kind),
        "edgecolor": theme.PAPER.light,
        "hatch": theme.hatch_of(kind) * density or None,
        "linewidth": 0.0,
    }


def sentence_only(title: str, sentence: str) -> Figure:
    """A figure that says in words why there is nothing to draw."""
    figure, (axes,) = new_figure(title, 0.7)
    axes.set_axis_off()
    axes.text(0.0, 0.5, "\n".join(wrapped(sentence, theme.TEXT)), va="center", transform=axes.transAxes)
    return figure


def kind_word(kind: str) -> str:
    """A kind in the reader's language."""
    words = {
        "data": _("data"),
        "forward": _("forward"),
        "backward": _("backward"),
        "step": _("optimizer step"),
        "communication": _("communication"),
        "wait": _("waiting"),
        "checkpoint": _("checkpoint"),
        "other": _("other"),
        "parameters": _("parameters"),
        "gradients": _("gradients"),
        "optimizer state": _("optimizer state"),
        "activations": _("activations"),
        "gathered": _("gathered parameters"),
        "buffers": _("buffers"),
        "inputs": _("inputs"),
    }
    return words.get(kind.replace("_", " "), kind)


def formula_style() -> dict[str, Any]:
    """How what a formula says is drawn: hollow and dashed, beside the filled measurement."""
    return {"facecolor": "none", "edgecolor": theme.INK.light, "linewidth": 1.4, "linestyle": (0, (4, 2))}


def formula_swatch() -> Patch:
    """The legend entry of a formula."""
    return Patch(label=_("formula"), **formula_style())
