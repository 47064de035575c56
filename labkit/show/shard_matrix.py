"""Matrices in the colours of the ranks that hold them, read from the Placements of real parameters."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from labkit.mesh import Placement
from labkit.show import theme
from labkit.show.canvas import add_legend, fill_of, new_figure, swatch
from labkit.show.picture import Picture, drawing
from labkit.words import _


def shard_matrices(
    placements: Mapping[str, Sequence[Placement]], *, title: str, columns: int = 4, alt: str | None = None
) -> Picture:
    """Each matrix, or vector, to scale of its sides' square roots, its pieces in the colours of the ranks.

    `placements[name]` are the Placements of one parameter, in rank order, as `placements_of` gives them on the ranks. A
    weight [out, in] is drawn as it multiplies x from the right: inputs from top to bottom, outputs from left to right,
    so that a piece by columns is a column. What every rank holds is grey. No matrices, another number of ranks for one
    of them, or more than two dims is a ValueError.
    """
    if not placements:
        raise ValueError("shard_matrices needs one matrix or more")
    ranks = len(next(iter(placements.values())))
    for name, pieces in placements.items():
        if len(pieces) != ranks or not pieces:
            raise ValueError(f"{name} has the placements of {len(pieces)} ranks, others of {ranks}")
        if len(pieces[0].shape) > 2 or not pieces[0].shape:
            raise ValueError(f"{name} has {len(pieces[0].shape)} dims; a matrix or a vector can be drawn")
    longest = max(max(pieces[0].shape) for pieces in placements.values())
    kinds = [kind for kind in theme.series_meanings([f"rank {rank}" for rank in range(ranks + 1)]) if kind != "wait"]
    across = min(columns, len(placements))
    down = -(-len(placements) // across)
    tallest = max(_length(_sides(pieces[0])[0][0], longest) for pieces in placements.values())
    with drawing():
        height = down * (0.5 + tallest * theme.WIDTH * 0.9 / across) + 0.35
        figure, axes = new_figure(title, height, rows=down, columns=across)
        for axis in axes[len(placements) :]:
            axis.set_axis_off()
        for axis, (name, pieces) in zip(axes, placements.items(), strict=False):
            _draw(axis, pieces, kinds, longest)
            axis.set_ylim(tallest + 0.02, -0.02)
            axis.set_title(f"{name}\n{_size(pieces[0])}")
        labels = [_("rank {rank}").format(rank=rank) for rank in range(ranks)]
        handles = [swatch(kind, label) for kind, label in zip(kinds, labels, strict=False)]
        if any(_replicated(pieces) for pieces in placements.values()):
            handles.append(swatch("wait", _("every rank")))
        add_legend(figure, handles)
    return Picture(figure, title, alt or _describe(placements))


def _replicated(pieces: Sequence[Placement]) -> bool:
    return len(pieces) > 1 and all(piece.is_whole for piece in pieces)


def _sides(piece: Placement) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(inputs, outputs) of the whole, and the piece's ranges of inputs and of outputs."""
    if len(piece.shape) == 1:
        return (1, piece.shape[0]), (0, 1), piece.slices[0]
    return (piece.shape[1], piece.shape[0]), piece.slices[1], piece.slices[0]


def _length(side: int, longest: int) -> float:
    return max(0.09, math.sqrt(side / longest))


def _size(piece: Placement) -> str:
    rows, across = _sides(piece)[0]
    return f"{rows} x {across}" if len(piece.shape) == 2 else f"{across}"


def _draw(axis: Axes, pieces: Sequence[Placement], kinds: Sequence[str], longest: int) -> None:
    (rows, across), _rows, _across = _sides(pieces[0])
    tall, wide = _length(rows, longest), _length(across, longest)
    for rank, piece in enumerate(pieces[:1] if _replicated(pieces) else pieces):
        _whole, (top, bottom), (left, right) = _sides(piece)
        kind = "wait" if _replicated(pieces) else kinds[rank]
        corner = left / across * wide, top / rows * tall
        size = (right - left) / across * wide, (bottom - top) / rows * tall
        axis.add_patch(Rectangle(corner, *size, **fill_of(kind)))
    axis.add_patch(Rectangle((0, 0), wide, tall, facecolor="none", edgecolor=theme.QUIET.light, linewidth=0.8))
    axis.set_xlim(-0.02, 1.02)
    axis.set_aspect("equal", anchor="NW")
    axis.set_axis_off()


def _describe(placements: Mapping[str, Sequence[Placement]]) -> str:
    sentences = []
    for name, pieces in placements.items():
        whole = _sides(pieces[0])[0]
        if _replicated(pieces):
            sentences.append(_("{name}: every rank holds all of it.").format(name=name))
            continue
        rows = len({_sides(piece)[1] for piece in pieces}) > 1
        way = _("rows") if rows else _("columns")
        text = _("{name}, {inputs} by {outputs}: cut by {way}, a piece for each of {ranks} ranks.")
        sentences.append(text.format(name=name, inputs=whole[0], outputs=whole[1], way=way, ranks=len(pieces)))
    return " ".join(sentences)
