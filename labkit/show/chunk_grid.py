"""The chunk grid: which ranks' contributions each rank's chunks hold, one small grid a step.

A cell is one chunk on one rank; it has a stripe for every rank, filled where that rank's contribution is in.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from labkit.show import theme
from labkit.show.canvas import add_legend, fill_of, new_figure, swatch
from labkit.show.picture import Picture, drawing
from labkit.words import _

Held = Sequence[Sequence[int]]


def chunk_grid(
    steps: Sequence[Held],
    *,
    title: str,
    names: Sequence[str] | None = None,
    alt: str | None = None,
) -> Picture:
    """One grid a step, rows ranks and columns chunks, as read from the ranks' own tensors.

    `steps[s][rank][chunk]` is a whole number whose bit r says that rank r's contribution is in: what a ring of sums
    leaves in the chunks when rank r contributes 2 to the power r. `names` titles the grids. Grids that differ in size
    are a ValueError.
    """
    cells = [np.asarray(held, dtype=np.int64) for held in steps]
    if not cells or cells[0].ndim != 2 or any(held.shape != cells[0].shape for held in cells):
        raise ValueError("a chunk grid needs one or more steps, each with one row a rank and one number a chunk")
    ranks, chunks = cells[0].shape
    named = list(names) if names is not None else [_("step {step}").format(step=step) for step in range(len(cells))]
    across = min(4, len(cells))
    down = -(-len(cells) // across)
    kinds = theme.series_meanings([f"rank {rank}" for rank in range(ranks)])
    with drawing():
        height = down * (0.45 + 0.34 * ranks) + 0.55
        figure, axes = new_figure(title, height, rows=down, columns=across)
        for axis in axes[len(cells) :]:
            axis.set_axis_off()
        for number, (axis, held, name) in enumerate(zip(axes, cells, named, strict=False)):
            _draw(axis, held, kinds)
            axis.set_title(name)
            axis.set_xticks(np.arange(chunks) + 0.5, [str(chunk) for chunk in range(chunks)])
            first = number % across == 0
            axis.set_yticks(
                np.arange(ranks) + 0.5, [_("rank {rank}").format(rank=r) for r in range(ranks)] if first else []
            )
            axis.tick_params(length=0)
            if number // across == down - 1:
                axis.set_xlabel(_("chunk"))
        labels = [_("from rank {rank}").format(rank=rank) for rank in range(ranks)]
        add_legend(figure, [swatch(kind, label) for kind, label in zip(kinds, labels, strict=True)])
    return Picture(figure, title, alt or _describe(cells, named))


def _draw(axis: Axes, held: np.ndarray, kinds: Sequence[str]) -> None:
    ranks, chunks = held.shape
    for rank in range(ranks):
        for chunk in range(chunks):
            for source in range(ranks):
                if held[rank, chunk] >> source & 1:
                    left = chunk + 0.08 + 0.84 * source / ranks
                    axis.add_patch(Rectangle((left, rank + 0.12), 0.84 / ranks, 0.76, **fill_of(kinds[source])))
            axis.add_patch(
                Rectangle(
                    (chunk + 0.06, rank + 0.1), 0.88, 0.8, facecolor="none", edgecolor=theme.QUIET.light, linewidth=0.8
                )
            )
    axis.set_xlim(0, chunks)
    axis.set_ylim(ranks, 0)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)


def _describe(cells: Sequence[np.ndarray], names: Sequence[str]) -> str:
    text = _("Grids of contributions: rows are ranks, columns chunks.")
    for held, name in zip(cells, names, strict=True):
        counts = [[int(value).bit_count() for value in row] for row in held.tolist()]
        whole = sum(count == len(held) for row in counts for count in row)
        sentence = _("{name}: {whole} of {all} cells hold all contributions.")
        text += " " + sentence.format(name=name, whole=whole, all=held.size)
    return text
