"""A number as its bits, to look at and to toggle."""

import pytest
import torch

from labkit.precision import BFLOAT16, FLOAT8_E4M3, FLOAT16, FLOAT32, FORMATS, Format, decode
from labkit.show import bit_toggles, explore_bits, number_bits
from labkit.show.bit_row import landmarks
from labkit.show.bit_toggles import BitPanel


@pytest.fixture
def shown(monkeypatch):
    """What explore_bits displays, in a process without a kernel."""
    found = []
    monkeypatch.setattr(bit_toggles, "display", lambda thing, **_: found.append(thing))
    return found


@pytest.mark.parametrize(
    ("pattern", "form", "words"),
    [
        (0b0_10000000_1001001, BFLOAT16, "+ 2^(128 − 127) × (1 + 73/128) = 3.140625"),
        (0b1_01111_0000000000, FLOAT16, "− 2^(15 − 15) × (1 + 0/1024) = -1"),
        (1, FLOAT16, "+ 2^-14 × (0 + 1/1024), a subnormal number: 5.9604645e-08"),
        (0x7C00, FLOAT16, "+ infinity"),
        (0x7F, FLOAT8_E4M3, "not a number (NaN)"),
        (0x7E, FLOAT8_E4M3, "+ 2^(15 − 7) × (1 + 6/8) = 448"),
    ],
)
def test_a_picture_says_how_the_number_follows_from_its_bits(pattern: int, form: Format, words: str) -> None:
    assert words in number_bits(pattern, form).alt


def test_every_bit_is_drawn_once_and_filled_where_it_is_set() -> None:
    for form in FORMATS.values():
        pattern = (1 << form.bits) - 1 & 0x55555555
        boxes = number_bits(pattern, form).figure.axes[0].patches
        assert len(boxes) == form.bits
        assert "".join("1" if box.get_facecolor()[3] else "0" for box in boxes) == f"{pattern:0{form.bits}b}"


def test_the_still_twin_has_other_patterns_to_unfold(shown) -> None:
    explore_bits(title="Try")
    html = shown[0]._repr_mimebundle_()["text/html"]
    assert html.count("<img ") == 1 + len(landmarks(BFLOAT16)) and "<details>" in html
    assert "bfloat16: these bits are 1" in shown[0].picture.title


def test_landmarks_are_what_they_are_called() -> None:
    for form in FORMATS.values():
        one, after, largest, smallest = decode(torch.tensor(list(landmarks(form).values())), form).tolist()
        assert (one, after, largest, smallest) == (1.0, 1 + form.eps, form.max, form.smallest_subnormal)


def test_pressing_a_button_toggles_its_bit_and_another_format_begins_at_one() -> None:
    changes: list[tuple[str, int]] = []
    panel = BitPanel("bfloat16", 0x3F80, lambda *change: changes.append(change))
    panel.row.children[0].value = True
    panel.row.children[-1].value = True
    assert [button.description for button in panel.row.children[:2]] == ["1", "0"]
    panel.menu.value = "float32"
    assert len(panel.row.children) == FLOAT32.bits
    panel.row.children[1].value = True
    assert changes == [("bfloat16", 0xBF80), ("bfloat16", 0xBF81), ("float32", 0x3F800000), ("float32", 0x7F800000)]


def test_what_is_no_pattern_or_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a pattern of float16 is a whole number from 0 to 2\^16 - 1, not 65536"):
        number_bits(65536, FLOAT16)
    with pytest.raises(ValueError, match="there is no format 'float17'; there are float32, tfloat32"):
        explore_bits(title="t", form="float17")
