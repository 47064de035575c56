"""Bars and curves: values beside their formula, in units that people read."""

import numpy as np
import pytest

from labkit.show import Picture, bars, curves
from labkit.show.units import amount, fitting, number

LABELS = {"title": "t", "x_label": "world size", "y_label": "sent"}


def notes(picture: Picture) -> list[str]:
    return [text.get_text() for text in picture.figure.axes[0].texts]


def ticks(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567, "1,234,567"), (12.5, "12.5"), (0.123456, "0.1235"), (100, "100"), (3e-7, "3e-07")],
)
def test_numbers_have_four_digits_and_no_idle_zeros(value, text):
    assert number(value) == text


def test_bytes_and_seconds_get_a_unit_that_fits_the_largest():
    assert fitting([1.0, 2_500_000.0], "bytes") == (1e6, "MB")
    assert amount(1536, "bytes", binary=True) == "1.5 KiB"
    assert amount(0.0021, "seconds") == "2.1 ms"
    assert amount(0, "bytes") == "0 B"
    assert amount(7, "messages") == "7 messages"
    assert fitting([float("nan"), 5e3], "bytes") == (1e3, "kB")


def test_a_bar_is_as_long_as_its_value_and_has_it_beside():
    picture = bars({"ring": 3e6, "naive": 9e6}, unit="bytes", quantity="sent by a rank", title="t")
    assert [patch.get_width() for patch in picture.figure.axes[0].patches] == [3, 9]
    assert notes(picture) == ["3", "9"]
    assert picture.figure.axes[0].get_xlabel() == "sent by a rank (MB)"
    assert ticks(picture.figure.axes[0].yaxis) == ["ring", "naive"]


def test_a_formula_says_equal_only_if_it_is_equal_to_the_last_byte():
    picture = bars({"a": 1_000_000, "b": 1_000_001, "c": 900_000}, unit="bytes", title="t", formula=1_000_000)
    assert notes(picture)[1::2] == ["1 (equal)", "1 (measured 0.0001 % more)", "1 (measured 10 % less)"]
    assert "a: 1 MB, formula 1 MB, equal." in picture.alt


def test_the_formula_may_speak_of_some_bars_only():
    assert len(bars({"a": 1, "b": 2}, unit="s", title="t", formula={"b": 2}).figure.axes[0].patches) == 3


def test_a_spread_is_a_line_over_its_bar_and_stands_in_the_words():
    picture = bars({"ours": 2e-3, "theirs": 3e-3}, unit="seconds", title="t", spread={"ours": (1e-3, 4e-3)})
    (line,) = picture.figure.axes[0].collections
    assert [tuple(point) for point in line.get_segments()[0]] == [(1.0, 0.0), (4.0, 0.0)]
    assert "ours: 2 ms, mostly 1 ms to 4 ms. theirs: 3 ms." in picture.alt
    (beside, _) = (text for text in picture.figure.axes[0].texts)
    assert beside.xy[0] == 4, "the number stands beyond the line"


@pytest.mark.parametrize(
    ("spread", "sentence"),
    [
        ({"a": (2, 1)}, "from low to high; that of a goes from 2.0 to 1.0"),
        ({"b": (1, 2)}, "the spread speaks of b, which is not among a"),
        ({"a": (0, float("inf"))}, "a is inf"),
    ],
)
def test_a_spread_that_is_none_is_refused(spread, sentence):
    with pytest.raises(ValueError, match=sentence):
        bars({"a": 1}, unit="s", title="t", spread=spread)


def test_an_emulated_network_is_named():
    for picture in (
        bars({"a": 1}, unit="s", title="t", network="1 ms"),
        curves([1], {"a": [1]}, unit="s", network="1 ms", **LABELS),
    ):
        assert picture.figure.axes[0].get_title("left") == "emulated network: 1 ms"
        assert "emulated network: 1 ms" in picture.alt


@pytest.mark.parametrize(
    ("values", "formula", "sentence"),
    [
        ({}, None, "at least one value"),
        ({"a": -1}, None, "a is -1"),
        ({"a": float("nan")}, None, "a is nan"),
        ({"a": 1}, {"b": 1}, "speaks of b, which is not among a"),
        ({"a": 1}, float("inf"), "a is inf"),
    ],
)
def test_bars_refuse_what_they_cannot_draw(values, formula, sentence):
    with pytest.raises(ValueError, match=sentence):
        bars(values, unit="s", title="t", formula=formula)


def test_a_curve_goes_through_its_values_and_leaves_gaps():
    picture = curves([1, 2, 4], {"ring": [1e3, None, 3e3]}, unit="bytes", **LABELS)
    (line,) = picture.figure.axes[0].lines
    np.testing.assert_array_equal(line.get_ydata(), [1, np.nan, 3])
    assert picture.figure.axes[0].get_ylabel() == "sent (kB)"
    assert picture.figure.axes[0].get_xlabel() == "world size"


def test_predicted_is_dashed_and_has_the_colour_of_its_series():
    picture = curves([1, 2], {"a": [1, 2], "b": [3, 4]}, predicted={"a": [1, 2], "limit": [5, 5]}, unit="", **LABELS)
    solid, dashed, other, limit = picture.figure.axes[0].lines
    assert solid.get_color() == dashed.get_color() and solid.get_linestyle() == "-" and dashed.get_linestyle() == "--"
    assert len({line.get_color() for line in (solid, other, limit)}) == 3
    assert solid.get_marker() != other.get_marker()
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert sorted(labels) == ["a", "a, predicted", "b", "limit, predicted"]


def test_a_logarithmic_axis_has_a_unit_at_every_tick_and_world_sizes_as_they_are():
    picture = curves([1, 2, 4, 8], {"a": [10, 1e3, 1e6, 1e9]}, unit="bytes", log="xy", **LABELS)
    axes = picture.figure.axes[0]
    assert ticks(axes.xaxis) == ["1", "2", "4", "8"]
    assert {"1 kB", "1 MB", "1 GB"} <= set(ticks(axes.yaxis))


def test_the_words_tell_ends_and_extremes():
    picture = curves([0, 1, 2], {"loss": [2.5, 3.0, 0.5]}, title="t", x_label="step", y_label="loss", unit="")
    assert picture.alt == "Curves of loss over step. loss: 2.5 at 0, 0.5 at 2; least 0.5, most 3."


def test_long_series_carry_some_markers_only():
    picture = curves(range(1000), {"loss": range(1000)}, unit="", **LABELS)
    assert picture.figure.axes[0].lines[0].get_markevery() == 83


@pytest.mark.parametrize(
    ("x", "series", "log", "sentence"),
    [
        ([1], {}, "", "at least one series"),
        ([1], {"a": [None]}, "", "at least one series"),
        ([1, 2], {"a": [1]}, "", "'a' has 1 values for 2 places on x"),
        ([1], {"a": [0]}, "y", "'a' has a value of zero or less"),
        ([0], {"a": [1]}, "x", "above zero where the axis is logarithmic"),
    ],
)
def test_curves_refuse_what_they_cannot_draw(x, series, log, sentence):
    with pytest.raises(ValueError, match=sentence):
        curves(x, series, unit="", log=log, **LABELS)
