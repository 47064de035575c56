"""The picture of shards says who holds what, from Placements alone."""

import pytest
import torch

from labkit import show
from labkit.mesh import Axis, Placement


def pieces(shape, dim, ranks=2):
    """The Placements of a tensor cut along `dim`, or whole on every rank."""
    found = []
    for rank in range(ranks):
        axis = Axis("tp", tuple(range(ranks)), rank)
        whole = Placement(shape, torch.float32)
        found.append(whole.replicated(axis) if dim is None else whole.sharded(dim, axis))
    return found


def test_it_tells_columns_from_rows_and_from_what_every_rank_holds():
    held = {"up": pieces((8, 4), 0), "down": pieces((4, 8), 1), "norm": pieces((4,), None)}
    picture = show.shard_matrices(held, title="Matrices are cut, norms are not")
    assert picture.alt == (
        "up, 4 by 8: cut by columns, a piece for each of 2 ranks. down, 8 by 4: cut by rows, a piece for each of 2 "
        "ranks. norm: every rank holds all of it."
    )


def test_a_piece_covers_its_share_of_the_matrix():
    picture = show.shard_matrices({"up": pieces((9, 9), 0, 2)}, title="Uneven columns")
    first, second, outline = picture.figure.axes[0].patches
    assert first.get_width() / second.get_width() == pytest.approx(5 / 4)
    assert first.get_width() + second.get_width() == pytest.approx(outline.get_width())
    assert first.get_height() == second.get_height() == outline.get_height()


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({}, "needs one matrix or more"),
        ({"a": pieces((2, 2), 0), "b": pieces((2, 2), 0, 3)}, "b has the placements of 3 ranks, others of 2"),
        ({"a": pieces((2, 2, 2), 0)}, "a has 3 dims"),
    ],
)
def test_what_can_not_be_drawn_is_refused(held, words):
    with pytest.raises(ValueError, match=words):
        show.shard_matrices(held, title="A title")
