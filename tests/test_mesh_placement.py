"""A Placement says which piece of a tensor a rank holds; pieces make up the whole again; nonsense is refused."""

import pickle
import random

import pytest
import torch
from layouts import DTYPES, filled, layout, line, random_shape
from torch import nn

from labkit.mesh import (
    FlatPart,
    Gradient,
    Placement,
    copy_overlap,
    gradient_of,
    partition_fault,
    place,
    placement_of,
    placements_of,
)
from labkit.mesh.boxes import cut, sizes


def test_the_pieces_of_any_layout_put_together_are_the_whole() -> None:
    rng = random.Random(0)
    for _ in range(400):
        shape, dtype = random_shape(rng), rng.choice(DTYPES)
        full = filled(shape, dtype)
        placements = layout(rng, shape, dtype, rng.randint(1, 4))
        again = torch.zeros_like(full)
        for placement in placements:
            piece = placement.take(full)
            assert piece.shape == placement.local_shape and piece.numel() == placement.numel
            assert piece.is_contiguous() and piece.dtype == dtype
            placement.put(again, piece)
        assert torch.equal(again, full)


def test_a_piece_is_a_copy_and_put_writes_nowhere_else() -> None:
    full = torch.arange(12.0).view(3, 4)
    placement = Placement.of(full).sharded(1, line(2, 1))
    piece = placement.take(full)
    assert piece.tolist() == [[2, 3], [6, 7], [10, 11]]
    piece.fill_(-1)
    assert full.flatten().tolist() == list(range(12))
    placement.put(full, piece)
    assert full.tolist() == [[0, 1, -1, -1], [4, 5, -1, -1], [8, 9, -1, -1]]


def test_slices_and_ranges_mean_what_they_say() -> None:
    full = torch.arange(24).view(2, 3, 4)
    whole = Placement.of(full)
    assert whole.is_whole and whole.take(full).equal(full)
    assert whole.sharded_flat(3, 9, line(4, 0)).take(full).tolist() == [3, 4, 5, 6, 7, 8]
    rows = whole.sharded(1, line(2, 0))
    assert rows.local_shape == (2, 2, 4) and rows.take(full).equal(full[:, :2])
    assert rows.sharded_flat(6, 10, line(4, 0, "zero")).take(full).tolist() == [6, 7, 12, 13]
    assert rows.sharded(-1, line(4, 3, "x")).take(full).equal(full[:, :2, 3:])
    twice = whole.sharded_flat(4, 20, line(2, 0)).sharded_flat(2, 5, line(2, 0, "inner"))
    assert twice.take(full).tolist() == [6, 7, 8]


def test_an_uneven_dim_is_shared_out_with_the_longer_parts_first() -> None:
    parts = [Placement((11, 2), torch.float32).sharded(0, line(4, r)).slices[0] for r in range(4)]
    assert parts == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [b - a for a, b in parts] == [len(t) for t in torch.arange(11).tensor_split(4)]
    assert [Placement((2,), torch.float32).sharded(0, line(3, r)).numel for r in range(3)] == [1, 1, 0]


def test_the_boxes_of_a_flat_range_are_its_elements_in_order_and_few() -> None:
    rng = random.Random(1)
    for _ in range(300):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
        block = tuple((start, start + size) for start, size in ((rng.randint(0, 3), size) for size in shape))
        full = torch.arange(4096).view(8, 8, 8, 8)[(0,) * (4 - len(shape))]
        flat = full[tuple(slice(*pair) for pair in block)].flatten()
        start = rng.randint(0, flat.numel())
        stop = rng.randint(start, flat.numel())
        boxes = cut(block, start, stop)
        found = [full[tuple(slice(*pair) for pair in box)].flatten() for box in boxes]
        assert torch.cat([flat[:0], *found]).equal(flat[start:stop])
        assert len(boxes) <= 2 * len(shape) - 1 and all(0 not in sizes(box) for box in boxes)


def test_any_layout_reshards_into_any_other_copying_each_element_once() -> None:
    rng = random.Random(2)
    for _ in range(300):
        shape, dtype = random_shape(rng), rng.choice(DTYPES)
        full = filled(shape, dtype)
        old = layout(rng, shape, dtype, rng.randint(1, 4))
        if old[0].is_whole:
            old = old[:1]
        for new in layout(rng, shape, dtype, rng.randint(1, 4)):
            local = torch.empty(new.local_shape, dtype=dtype)
            copied = [copy_overlap(local, new, held.take(full), held) for held in old]
            assert sum(copied) == new.numel
            assert local.equal(new.take(full))


def test_pieces_that_leave_gaps_or_overlap_are_found() -> None:
    whole = Placement((4, 3), torch.float32)
    top, bottom = (whole.sharded(0, line(2, r)) for r in range(2))
    assert partition_fault([top, bottom]) is None
    assert partition_fault([top]) == "its pieces hold 6 of its 12 elements"
    assert "overlap" in str(partition_fault([whole, bottom]))
    assert "overlap" in str(partition_fault([top, whole.sharded_flat(5, 12, line(2, 1))]))
    assert partition_fault([top, whole.sharded_flat(6, 12, line(2, 1))]) is None
    assert "float32 [4, 3] and float64 [4, 3]" in str(partition_fault([whole, Placement((4, 3), torch.float64)]))
    assert partition_fault([]) == "no rank holds it"


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda w: Placement((4, 3), torch.float32, ((0, 5), (0, 3))), "dim 0 is cut from 0 to 5, but its size is 4"),
        (lambda w: Placement((4, 3), torch.float32, ((0, 4),)), "1 slices for the 2 dims of [4, 3]"),
        (lambda w: w.sharded_flat(3, 13, line(2, 0)), "the flat range is 3 to 13, but the block has 12 elements"),
        (lambda w: w.sharded(2, line(2, 0)), "there is no dim 2 in a tensor of shape [4, 3]"),
        (lambda w: w.sharded(0, line(2, 0), start=1), "give both start and stop, or neither"),
        (lambda w: w.sharded_flat(0, 4, line(2, 0)).sharded(0, line(2, 0, "tp")), "shard along dims first"),
        (lambda w: w.sharded(0, line(2, 0)).replicated(line(2, 0)), "axis 'dp' is named twice"),
        (lambda w: w.take(torch.zeros(3, 4)), "the global tensor has shape [3, 4], not [4, 3]"),
        (lambda w: w.put(torch.zeros(4, 3), torch.zeros(12)), "the piece has shape [12], not [4, 3]"),
        (lambda w: line(2, 2), "coordinate is 2"),
        (lambda w: FlatPart(torch.zeros(10), 0, w), "elements 0 to 12 of a tensor of 10"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(build, sentence) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError) as caught:
        build(Placement((4, 3), torch.float32))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_placement_is_plain_data_that_travels() -> None:
    placement = Placement((4, 3), torch.float32).sharded(0, line(2, 1, "tp")).replicated(line(3, 0))
    again = pickle.loads(pickle.dumps(placement))
    assert again == placement and hash(again) == hash(placement)
    assert placement != Placement((4, 3), torch.float32).sharded(0, line(2, 0, "tp")).replicated(line(3, 0))


def test_a_parameter_carries_its_placement_and_is_whole_without_one() -> None:
    first, second = nn.Linear(4, 3), nn.Linear(3, 3)
    second.bias = first.bias  # tied: one parameter, two names
    model = nn.Sequential(first, second)
    placement = Placement((8, 3), torch.float32).sharded(0, line(2, 1), start=4, stop=7)
    place(second.weight, placement)
    assert placement_of(second.weight) == placement
    assert placements_of(model) == {
        "0.weight": Placement((3, 4), torch.float32),
        "0.bias": Placement((3,), torch.float32),
        "1.weight": placement,
    }
    assert gradient_of(second.weight) == (None, placement)
    shard = torch.ones(5)
    held = Placement((3, 4), torch.float32).sharded_flat(0, 5, line(2, 0))
    place(first.weight, placement_of(first.weight), gradient=Gradient(lambda: shard, held))
    assert gradient_of(first.weight) == (shard, held)
    assert placement_of(first.weight).is_whole
