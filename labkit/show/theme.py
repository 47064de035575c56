"""One theme for all pictures: one colour per meaning, each with a twin for dark pages.

Pictures are drawn in the light colours; `dark_rules` is the style sheet by which the same SVG turns dark where the
page around it is dark. The colours for dark pages are the palette of M. Okabe and K. Ito, Color Universal Design
(2008), which people with any of the three colour deficiencies tell apart; against white half of it is too pale, so the
light colours keep its hues and are darker. Every colour of a shape has a contrast of at least 3:1 with its paper, every
text 4.5:1 (WCAG 2.2, success criteria 1.4.11 and 1.4.3). Shapes also differ in hatch, marker or label.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Color(NamedTuple):
    """A colour on light paper, its twin on dark paper, and which of `LABELS` text upon it takes."""

    light: str
    dark: str
    label: str = ""


# Pure black is not used: matplotlib leaves it out of the SVG as the default, where no rule would find it.
PAPER = Color("#ffffff", "#111111")
INK = Color("#1f1f1f", "#e6e6e6")
QUIET = Color("#595959", "#b5b5b5")
GRID = Color("#dadada", "#3a3a3a")

#: Text upon a shape: white or black, whichever the two colours of that shape bear.
LABELS = {
    "white": Color("#fffffe", "#ffffff"),
    "black": Color("#010101", "#000000"),
    "white, black": Color("#fffffd", "#000001"),
    "black, white": Color("#010100", "#fffffc"),
}

MEANINGS = {
    "data": Color("#223f9a", "#0072b2", "white"),
    "forward": Color("#2f95dc", "#56b4e9", "black"),
    "backward": Color("#d06800", "#e69f00", "black"),
    "step": Color("#00795a", "#009e73", "white, black"),
    "communication": Color("#a8327a", "#cc79a7", "white, black"),
    "wait": Color("#939393", "#686868", "black, white"),
    "checkpoint": Color("#5c5200", "#f0e442", "white, black"),
    "other": Color("#333333", "#dddddd", "white, black"),
    "pass": Color("#00795b", "#009e74", "white, black"),
    "fail": Color("#c23b00", "#d55e00", "white, black"),
}

#: Memory is coloured like the work that makes it: the forward pass makes activations, and so on.
MEMORY = {
    "parameters": "checkpoint",
    "optimizer state": "step",
    "gradients": "backward",
    "activations": "forward",
    "buffers": "communication",
    "inputs": "data",
    "gathered": "wait",
}

#: The pattern over the colour (drawn two or three times as dense), so that no meaning hangs on colour alone.
HATCHES = {
    "data": "-",
    "forward": "",
    "backward": "/",
    "step": "x",
    "communication": "",
    "wait": "\\",
    "checkpoint": "+",
    "other": "",
}

#: Series without a meaning of their own, ranks among them, take these in turn; markers differ too.
SERIES = ("forward", "backward", "step", "communication", "data", "checkpoint", "wait", "other")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

TITLE, TEXT, SMALL = 12.0, 10.0, 9.0  # points; a point is 4/3 of a pixel in the notebook
WIDTH = 7.5  # inches, 720 pixels: the text column of JupyterLab on a small laptop

#: Settings under which figures are made and written, whatever the notebook has set.
SETTINGS: dict[Any, Any] = {
    "figure.facecolor": PAPER.light,
    "axes.facecolor": "none",
    "axes.edgecolor": QUIET.light,
    "axes.labelcolor": INK.light,
    "axes.labelsize": TEXT,
    "axes.titlesize": SMALL,
    "axes.titlecolor": INK.light,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": GRID.light,
    "grid.linewidth": 0.8,
    "text.color": INK.light,
    "text.parse_math": False,  # a dollar sign is money here
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so that every machine draws the same
    "font.size": TEXT,
    "xtick.color": QUIET.light,
    "ytick.color": QUIET.light,
    "xtick.labelcolor": INK.light,
    "ytick.labelcolor": INK.light,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 6.0,
    "svg.fonttype": "path",
    "svg.hashsalt": "labkit",
    "savefig.facecolor": "auto",
    "savefig.bbox": None,
}


def meaning_of(word: str) -> str:
    """The meaning in `MEANINGS` that `word`, a kind of span or of memory or a verdict, is coloured as."""
    plain = word.replace("_", " ").strip().lower()
    plain = MEMORY.get(plain, plain)
    return plain if plain in MEANINGS else "other"


def color_of(kind: str) -> str:
    """The colour, as `#rrggbb`, of a kind of span or of memory, of "pass" or "fail"; that of "other" for other words.

    In a picture of `labkit.show` it turns into its twin where the page is dark.
    """
    return MEANINGS[meaning_of(kind)].light


def hatch_of(kind: str) -> str:
    """The matplotlib hatch of a kind, "" for none."""
    return HATCHES.get(meaning_of(kind), "")


def label_color_of(kind: str) -> str:
    """The colour of text upon the colour of `kind`."""
    return LABELS[MEANINGS[meaning_of(kind)].label].light


def series_meanings(names: Iterable[str]) -> list[str]:
    """A meaning for each series: its own where the name has one, else the next that no other series has."""
    names = list(names)
    own = [meaning_of(name) if meaning_of(name) != "other" else "" for name in names]
    free = [meaning for meaning in SERIES if meaning not in own] or list(SERIES)
    taken = 0
    for index, meaning in enumerate(own):
        if not meaning:
            own[index] = free[taken % len(free)]
            taken += 1
    return own


def dark_rules() -> str:
    """The style sheet by which an SVG in the light colours turns dark, if the page that shows it is dark."""
    colors = [PAPER, INK, QUIET, GRID, *LABELS.values(), *MEANINGS.values()]
    rules = "".join(
        f'[style*="fill: {color.light}"],[fill="{color.light}"]{{fill:{color.dark} !important}}'
        f'[style*="stroke: {color.light}"]{{stroke:{color.dark} !important}}'
        for color in colors
    )
    return f"@media (prefers-color-scheme: dark){{{rules}}}"
