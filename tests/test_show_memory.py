"""Memory over time and at its peak: what was sampled is what is drawn, stacked, in KiB, MiB or GiB."""

import pytest
from invented_records import MIB, NETWORK, step_record
from matplotlib.collections import FillBetweenPolyCollection, PolyCollection

from labkit.record import MemorySample, RankRecord, Record
from labkit.show import Picture, memory_bars, memory_over_time
from labkit.show.mountain import stack


def samples(*entries: tuple[float, str, int]) -> list[MemorySample]:
    return [MemorySample(time, 0, kind, size) for time, kind, size in entries]


def bars_of(picture: Picture) -> list[list[float]]:
    """The widths in each row, from the top."""
    rows: dict[float, list[float]] = {}
    for patch in picture.figure.axes[0].patches:
        rows.setdefault(round(patch.get_y() + patch.get_height() / 2, 3), []).append(patch.get_width())
    return [rows[y] for y in sorted(rows)]


def notes(picture: Picture) -> list[str]:
    return [text.get_text() for axes in picture.figure.axes for text in axes.texts]


def test_a_kind_keeps_its_size_until_its_next_sample_and_has_none_before_its_first():
    times, kinds, heights = stack(samples((1, "parameters", 10), (2, "activations", 5), (3, "activations", 0)))
    assert times.tolist() == [1, 2, 3]
    assert kinds == ["parameters", "activations"]
    assert heights.tolist() == [[10, 10, 10], [0, 5, 0]]


def test_of_two_samples_at_one_time_the_later_counts():
    assert stack(samples((1, "gradients", 10), (1, "gradients", 7)))[2].tolist() == [[7]]


def test_what_stays_lies_below_what_comes_and_goes():
    _, kinds, _ = stack(
        samples(*[(1, kind, 1) for kind in ("mystery", "activations", "optimizer_state", "parameters")])
    )
    assert kinds == ["parameters", "optimizer state", "activations", "mystery"]


def test_the_mountain_is_as_high_as_the_sum_of_what_is_alive():
    picture = memory_over_time(step_record(1), title="t")
    areas = [part for part in picture.figure.axes[0].collections if isinstance(part, FillBetweenPolyCollection)]
    assert len(areas) == 4
    assert max(area.get_paths()[0].vertices[:, 1].max() for area in areas) == pytest.approx(40)  # of 10, 20 and 10


def test_the_peak_is_marked_with_its_size_and_time():
    picture = memory_over_time(step_record(1), title="t")
    assert "peak 40 MiB" in notes(picture)
    assert "Rank 0 peaks at 40 MiB after" in picture.alt
    assert "parameters 10 MiB, optimizer state 20 MiB" in picture.alt


def test_by_change_every_change_has_the_same_width():
    memory = samples((1, "activations", 1 * MIB), (1.001, "activations", 0), (9, "activations", 2 * MIB))
    record = Record([RankRecord(0, memory=memory)])
    axes = memory_over_time(record, title="t", by_change=True).figure.axes[0]
    assert axes.get_xlabel() == "changes of memory" and axes.get_xlim() == (0, 2)
    (mountain,) = (found for found in axes.collections if isinstance(found, FillBetweenPolyCollection))
    assert {x for x, _ in mountain.get_paths()[0].vertices} == {0, 1, 2}
    picture = memory_over_time(record, title="t", by_change=True)
    assert "change by change. Rank 0 peaks at 2 MiB after 2 changes" in picture.alt


def test_each_rank_has_its_mountain_and_one_may_be_chosen():
    assert len([a for a in memory_over_time(step_record(3), title="t").figure.axes if a.axison]) == 3
    one = memory_over_time(step_record(3), title="t", rank=2)
    assert len(one.figure.axes) == 1 and "Rank 2 peaks" in one.alt and "Rank 0" not in one.alt


def test_axes_name_their_units():
    (axes,) = memory_over_time(step_record(1), title="t").figure.axes
    assert axes.get_xlabel() == "time since the start (ms)"
    assert axes.get_ylabel() == "memory (MiB)"
    assert memory_over_time(step_record(2), title="t", rank=1).figure.axes[0].get_ylabel() == "rank 1 (MiB)"
    assert memory_bars(step_record(2), title="t").figure.axes[0].get_xlabel() == "memory at the peak (MiB)"


def test_a_strip_says_what_was_computed():
    picture = memory_over_time(step_record(1), title="t")
    pieces = [part for part in picture.figure.axes[0].collections if type(part) is PolyCollection]
    assert sum(len(part.get_paths()) for part in pieces) == 5  # data, forward, backward, step, checkpoint
    assert "backward" in notes(picture)


@pytest.mark.parametrize("draw", [memory_over_time, memory_bars])
def test_an_emulated_network_is_named(draw):
    picture = draw(step_record(), title="t")
    assert picture.figure.axes[0].get_title("left") == f"emulated network: {NETWORK}"
    assert f"emulated network: {NETWORK}" in picture.alt


@pytest.mark.parametrize("draw", [memory_over_time, memory_bars])
def test_a_record_without_samples_gives_a_sentence(draw):
    assert draw(Record(), title="t").alt.startswith("There is nothing to draw: the record holds no samples of memory")


@pytest.mark.parametrize("draw", [memory_over_time, memory_bars])
def test_nothing_alive_is_no_error(draw):
    record = Record([RankRecord(0, memory=samples((1, "parameters", 0)))])
    assert "0 B" in draw(record, title="t").alt


def test_a_rank_that_is_not_there_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"the record has the ranks \[0, 1\], not 5"):
        memory_over_time(step_record(2), title="t", rank=5)


def test_a_bar_is_the_peak_of_a_rank_split_by_kind_beside_the_formula():
    formula = {"parameters": 10 * MIB, "optimizer_state": 20 * MIB, "gradients": 10 * MIB}
    picture = memory_bars(step_record(2), title="t", formula=formula)
    assert [sum(row) for row in bars_of(picture)] == pytest.approx([40, 40, 40])
    assert bars_of(picture)[2] == pytest.approx([10, 20, 10])
    assert [patch.get_x() for patch in picture.figure.axes[0].patches][-3:] == pytest.approx([0, 10, 30])
    labels = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    assert labels == ["rank 0", "rank 1", "formula"]
    assert "Formula: 40 MiB (parameters 10 MiB, optimizer state 20 MiB, gradients 10 MiB)." in picture.alt


def test_the_formula_is_hollow_so_that_it_differs_without_colour():
    picture = memory_bars(step_record(1), title="t", formula={"parameters": 10 * MIB})
    filled = [patch.get_facecolor()[3] > 0 for patch in picture.figure.axes[0].patches]
    assert filled == [True] * 4 + [False]
