"""Colours: enough contrast on either page, apart for every eye, and none in a picture that the theme doesn't know."""

import itertools
import re

import numpy as np
import pytest
from invented_records import step_record

from labkit.record import KINDS
from labkit.show import bars, color_of, curves, lanes, memory_bars, memory_over_time, theme

PAGES = {"light": "#ffffff", "dark": "#111111"}  # the background of outputs in JupyterLab's two themes

# How a colour looks to people who lack one kind of cone, on linear RGB: G. Machado, M. Oliveira, L. Fernandes, A
# Physiologically-based Model for Simulation of Color Vision Deficiency, IEEE TVCG 15 (2009), table 1, severity 1.0.
EYES = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(color: str) -> np.ndarray:
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.2, from 1 to 21."""
    low, high = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of a linear sRGB colour."""
    matrix = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = np.array(matrix) @ rgb / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one: str, other: str, eye: str) -> float:
    """CIE 1976 difference of two colours as `eye` sees them; about 2.3 is just noticeable side by side."""
    seen = [lab(np.clip(np.array(EYES[eye]) @ linear(color), 0, 1)) for color in (one, other)]
    return float(np.linalg.norm(seen[0] - seen[1]))


@pytest.mark.parametrize("page", PAGES)
def test_the_paper_of_pictures_is_the_background_of_jupyterlab(page):
    assert getattr(theme.PAPER, page) == PAGES[page]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("meaning", theme.MEANINGS)
def test_every_shape_stands_out_from_its_page(meaning, page):
    assert contrast(getattr(theme.MEANINGS[meaning], page), PAGES[page]) >= 3.0


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("color", [theme.INK, theme.QUIET], ids=["ink", "quiet"])
def test_text_can_be_read_on_its_page(color, page):
    assert contrast(getattr(color, page), PAGES[page]) >= 4.5


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("meaning", theme.MEANINGS)
def test_text_can_be_read_upon_every_colour(meaning, page):
    color = theme.MEANINGS[meaning]
    assert contrast(getattr(theme.LABELS[color.label], page), getattr(color, page)) >= 4.5


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("eye", EYES)
def test_kinds_are_told_apart_by_every_eye(eye, page):
    for one, other in itertools.combinations(KINDS, 2):
        apart = distance(*(getattr(theme.MEANINGS[kind], page) for kind in (one, other)), eye)
        assert apart >= 15, f"{one} and {other} differ by {apart:.1f}"


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("eye", EYES)
def test_pass_and_fail_are_told_apart_by_every_eye(eye, page):
    assert distance(getattr(theme.MEANINGS["pass"], page), getattr(theme.MEANINGS["fail"], page), eye) >= 30


def test_every_kind_of_span_has_a_colour_of_its_own():
    assert len({color_of(kind) for kind in KINDS}) == len(KINDS)
    assert color_of("no such kind") == color_of("other")


def test_memory_is_coloured_like_the_work_that_makes_it():
    assert color_of("gradients") == color_of("backward")
    assert color_of("optimizer_state") == color_of("step")


def test_kinds_on_the_same_lane_differ_without_colour_too():
    lane = [kind for kind in KINDS if kind not in ("communication", "wait")]
    plain = [kind for kind in lane if not theme.hatch_of(kind)]
    assert plain == ["forward", "other"]  # the one pale, the other nearly black, or the reverse
    assert len({theme.hatch_of(kind) for kind in lane}) == len(lane) - 1
    assert theme.hatch_of("communication") != theme.hatch_of("wait")


def test_series_keep_their_own_meaning_and_never_share_a_colour():
    meanings = theme.series_meanings(["ring", "forward", "tree", "communication"])
    assert meanings[1::2] == ["forward", "communication"]
    assert len(set(meanings)) == 4


def test_no_two_light_colours_are_the_same_since_the_dark_page_must_tell_them_apart():
    colors = [theme.PAPER, theme.INK, theme.QUIET, theme.GRID, *theme.LABELS.values(), *theme.MEANINGS.values()]
    assert len({color.light for color in colors}) == len(colors)
    assert "#000000" not in {color.light for color in colors}, "matplotlib writes no fill for pure black"


def test_no_picture_has_a_colour_that_would_stay_as_it_is_on_a_dark_page():
    record = step_record()
    pictures = [
        lanes(record, title="lanes"),
        memory_over_time(record, title="mountain"),
        memory_bars(record, title="footprint", formula={"parameters": 10.0}),
        bars({"a": 1.0}, unit="bytes", title="bars", formula=1.0),
        curves([1, 2], {str(i): [i + 1, i + 2] for i in range(8)}, title="c", x_label="x", y_label="y", unit=""),
    ]
    known = {
        color.light
        for color in (theme.PAPER, theme.INK, theme.QUIET, theme.GRID, *theme.LABELS.values(), *theme.MEANINGS.values())
    }
    for picture in pictures:
        rules, drawn = picture.svg().split("</style>", 1)
        found = set(re.findall(r"#[0-9a-f]{6}\b", drawn))
        assert found and found <= known, f"{picture.title}: {found - known}"
        for color in found:
            assert f'[style*="fill: {color}"]' in rules
        shapes = re.findall(r"<(?:path|rect|polygon|circle|use)\b[^>]*>", re.sub(r"(?s)<defs>.*?</defs>", "", drawn))
        assert "opacity" not in "".join(shapes)
