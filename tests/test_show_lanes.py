"""Rank lanes: every span is there, where and as long as it was, with what is needed to read them."""

import numpy as np
import pytest
from invented_records import NETWORK, step_record
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from labkit.record import RankRecord, Record, Span
from labkit.show import Picture, color_of, lanes, theme


def patches(picture: Picture) -> list[PathPatch]:
    return [patch for patch in picture.figure.axes[0].patches if isinstance(patch, PathPatch)]


def boxes(picture: Picture) -> list[tuple[str, float, float, float]]:
    """For each span drawn its colour, its left and right end in ms, and the height of its middle in rows."""
    found = []
    for patch in patches(picture):
        color = "#" + "".join(f"{round(255 * channel):02x}" for channel in patch.get_facecolor()[:3])
        for corners in patch.get_path().vertices.reshape(-1, 5, 2):
            (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
            found.append((color, left, right, (top + bottom) / 2))
    return found


def texts(picture: Picture) -> list[str]:
    axes = picture.figure.axes[0]
    return [text.get_text() for text in axes.texts]


def record_of(*spans: tuple[str, str, float, float], rank: int = 0) -> Record:
    """A record of one rank from (name, kind, start, end) in ms, on a clock that started long ago."""
    return Record([RankRecord(rank, [Span(n, kind, rank, 5.0 + a / 1e3, 5.0 + b / 1e3) for n, kind, a, b in spans])])


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_there_is_a_box_for_every_span(ranks):
    record = step_record(ranks)
    assert len(boxes(lanes(record, title="t"))) == len(record.events) == 11 * ranks


def test_a_box_is_where_its_span_was_in_milliseconds_from_the_start_of_the_record():
    record = record_of(("a", "forward", 0, 30), ("b", "backward", 50, 100))
    (_, a_left, a_right, _), (_, b_left, b_right, _) = boxes(lanes(record, title="t"))
    assert [a_left, b_left] == pytest.approx([0, 50])
    assert [a_right, b_right] == pytest.approx([30, 100], abs=0.2)  # but for the gap to the next


def test_communication_has_a_lane_below_compute():
    record = record_of(("a", "forward", 0, 30), ("b", "communication", 10, 20), ("c", "wait", 30, 40))
    heights = {color: height for color, _, _, height in boxes(lanes(record, title="t"))}
    assert heights[color_of("forward")] < 0.5 < heights[color_of("communication")]
    assert heights[color_of("wait")] > 0.5


def test_without_communication_there_is_one_lane_a_rank():
    ((_, _, _, height),) = boxes(lanes(record_of(("a", "forward", 0, 30)), title="t"))
    assert height == pytest.approx(0.5)


def test_a_span_that_lies_on_another_is_drawn_lower_and_above_it():
    record = record_of(("whole", "other", 0, 90), ("part", "forward", 10, 40), ("next", "other", 90, 99))
    by_color = {patch.get_facecolor()[:3]: patch for patch in patches(lanes(record, title="t"))}
    whole, part = by_color.values()
    assert part.get_zorder() > whole.get_zorder()
    assert np.ptp(part.get_path().vertices[:, 1]) < np.ptp(whole.get_path().vertices[:, 1])


def test_the_shortest_span_is_still_drawn_a_pixel_wide():
    record = record_of(("long", "forward", 0, 1000), ("flash", "step", 1000, 1000.000001))
    color, left, right, _ = boxes(lanes(record, title="t"))[1]
    assert color == color_of("step") and right - left > 0.5


def test_each_rank_has_its_row_from_top_to_bottom():
    axes = lanes(step_record(3), title="t").figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert axes.get_ylim() == (3, 0)


def test_the_axis_names_its_unit_and_the_title_is_there():
    picture = lanes(step_record(), title="Rank 1 is slower")
    assert picture.figure.axes[0].get_xlabel() == "time since the start (ms)"
    assert picture.figure._suptitle.get_text() == picture.title == "Rank 1 is slower"


def test_the_legend_has_the_kinds_that_are_there_and_no_others():
    picture = lanes(record_of(("a", "forward", 0, 30), ("b", "wait", 30, 40), ("c", "new", 40, 41)), title="t")
    (legend,) = picture.figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"forward", "waiting", "other"}


def test_an_emulated_network_is_named_in_the_picture_and_in_its_words():
    note = f"emulated network: {NETWORK}"
    assert lanes(step_record(), title="t").figure.axes[0].get_title("left") == note
    assert note in lanes(step_record(), title="t").words
    real = lanes(step_record(network=None), title="t")
    assert real.figure.axes[0].get_title("left") == "" and "network" not in real.words


def test_a_name_is_written_where_there_is_room_and_nothing_on_top():
    record = record_of(("wide enough", "forward", 0, 90), ("narrow", "backward", 90, 91), ("alone", "step", 91, 120))
    assert texts(lanes(record, title="t")) == ["wide enough", "alone"]
    covered = record_of(("below", "forward", 0, 90), ("upon", "step", 30, 80))
    assert texts(lanes(covered, title="t")) == ["upon"]


def test_the_words_say_how_long_each_kind_took_on_each_rank():
    words = lanes(step_record(), title="t").alt
    assert "Rank 0: data 2 ms, forward 10 ms, backward 20 ms, optimizer step 4 ms, communication 12 ms" in words
    assert "Rank 1: data 2 ms, forward 12 ms, backward 22 ms" in words


def test_the_words_for_many_ranks_say_least_and_most():
    assert "Each rank, forward: 10 to 40 ms." in lanes(step_record(16), title="t").alt


def test_an_empty_record_gives_a_sentence():
    picture = lanes(Record(), title="t")
    assert picture.alt.startswith("There is nothing to draw: the record holds no spans here.")
    assert "There is nothing to draw" in " ".join(texts(picture))


def test_ranks_and_a_window_can_be_chosen():
    record = step_record(4)
    assert len(boxes(lanes(record, title="t", ranks=[3, 1]))) == 22
    window = lanes(record, title="t", ranks=[0], between=(2, 11))
    assert window.figure.axes[0].get_xlim() == (2, 11)
    assert {color for color, *_ in boxes(window)} == {color_of("forward")}
    assert "forward 9 ms" in window.alt


def test_what_cannot_be_chosen_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"the record has the ranks \[0, 1\], not 7"):
        lanes(step_record(), title="t", ranks=[7])
    with pytest.raises(ValueError, match="from before to"):
        lanes(step_record(), title="t", between=(9, 2))


def test_thousands_of_spans_are_a_handful_of_shapes():
    spans = [(f"micro-batch {i}", ("forward", "backward")[i % 2], i, i + 0.9) for i in range(5000)]
    picture = lanes(record_of(*spans), title="t")
    assert len(patches(picture)) == 2
    assert sum(int((patch.get_path().codes == Path.MOVETO).sum()) for patch in patches(picture)) == 5000
    assert len(picture.svg()) < 500_000


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_nothing_is_cut_off_or_laid_over_the_legend(ranks):
    picture = lanes(step_record(ranks), title="A title of some length that states what is to be seen in this picture")
    figure, axes, (legend,) = picture.figure, picture.figure.axes[0], picture.figure.legends
    whole = figure.bbox
    for part in (axes.get_tightbbox(), legend.get_window_extent(), figure._suptitle.get_window_extent()):
        assert part.x0 >= -1 and part.y0 >= -1 and part.x1 <= whole.x1 + 1 and part.y1 <= whole.y1 + 1
    assert legend.get_window_extent().y1 <= axes.get_tightbbox().y0 + 1
    assert axes.get_tightbbox().y1 <= figure._suptitle.get_window_extent().y0 + 1
    assert figure.get_figwidth() == theme.WIDTH
