"""The pipeline grid: every action has its box where and as long as it was, and what is alive is counted."""

import numpy as np
import pytest
from matplotlib.patches import PathPatch

from labkit.parallel.pipeline import KNOWN, Costs, gpipe, interleaved, simulate, zb_h1
from labkit.record import RankRecord, Record, Span
from labkit.show import color_of, idle_share, pipeline_grid
from labkit.show.pipeline_boxes import alive_over_time, boxes_of


def drawn(axes):
    """The corners of each box, by colour."""
    found = {}
    for patch in axes.patches:
        if isinstance(patch, PathPatch):
            color = "#" + "".join(f"{round(255 * channel):02x}" for channel in patch.get_facecolor()[:3])
            found[color] = patch.get_path().vertices.reshape(-1, 5, 2)
    return found


def record_of(*steps):
    """A record of one rank: each step its (name, kind, start, end) in ms."""
    spans = [
        Span(name, kind, 0, 7 + a / 1e3, 7 + b / 1e3, {"micro_batch": int(name[-1]), "stage": 0})
        for step in steps
        for name, kind, a, b in step
    ]
    return Record([RankRecord(0, [*spans, Span("wait for 1B0", "wait", 0, 7, 8)])])


def test_there_is_a_box_for_every_action_in_the_colour_of_its_kind():
    axes = pipeline_grid({"a": simulate(zb_h1(3, 5))}, title="t").figure.axes[0]
    counts = {color: len(boxes) for color, boxes in drawn(axes).items()}
    assert counts == {color_of("forward"): 15, color_of("backward"): 15, color_of("step"): 15}


def test_a_box_is_as_long_as_its_action_in_the_row_of_its_rank():
    axes = pipeline_grid({"a": simulate(gpipe(2, 1), Costs(10, 30))}, title="t").figure.axes[0]
    (first, second), backward = drawn(axes)[color_of("forward")], drawn(axes)[color_of("backward")]
    assert [first[:, 0].min(), first[:, 0].max()] == pytest.approx([0, 10], abs=0.2)
    assert [second[:, 0].min(), second[:, 1].mean() > 1] == [10, True]
    assert sorted(np.ptp(box[:, 0]) for box in backward) == pytest.approx([30, 30], abs=0.2)


def test_labels_name_the_micro_batch_and_the_chunk_of_a_rank_with_several():
    axes = pipeline_grid({"a": simulate(interleaved(2, 2))}, title="t").figure.axes[0]
    assert {text.get_text() for text in axes.texts} == {"0a", "1a", "0b", "1b"}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_alive_is_what_the_schedule_says(name):
    schedule = KNOWN[name](4, 8)
    rows = boxes_of(simulate(schedule))
    assert [max(count for _, count in alive_over_time(row)) for row in rows] == schedule.peak_alive
    assert all(alive_over_time(row)[-1][1] == 0 for row in rows)


def test_of_a_record_the_fastest_step_is_shown_in_milliseconds_from_its_start():
    slow = [("0F0", "forward", 0, 20), ("0B0", "backward", 30, 80)]
    fast = [("0F0", "forward", 100, 110), ("0B0", "backward", 115, 140)]
    record = record_of(slow, fast, [(n, k, a + 900, b + 950) for n, k, a, b in slow])
    ((forward, backward),) = boxes_of(record)
    assert [forward.start, forward.end, backward.start, backward.end] == pytest.approx([0, 10, 15, 40])
    assert idle_share(record) == pytest.approx(5 / 40)


def test_measured_and_simulated_share_one_scale_and_the_network_is_named():
    grids = {"measured": record_of([("0F0", "forward", 0, 10)]), "simulated": simulate(gpipe(2, 2), Costs(50, 50))}
    picture = pipeline_grid(grids, title="t", alive=True, network="500 µs, 1 Gbit/s")
    first, strip, last = picture.figure.axes[:3]
    assert first.get_xlim() == strip.get_xlim() == last.get_xlim() and first.get_xlim()[1] >= 300
    assert "emulated network: 500 µs, 1 Gbit/s" in first.get_title(loc="left") + picture.alt
    assert "simulated: 300 ms in all, ranks idle 33.33 %" in picture.alt


@pytest.mark.parametrize("grids", [{}, {"a": Record([RankRecord(0, [])])}])
def test_nothing_to_draw_is_refused_in_a_sentence(grids):
    with pytest.raises(ValueError, match=r"at least one grid|no pipeline in this record"):
        pipeline_grid(grids, title="t")
