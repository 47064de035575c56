"""A picture: a figure with a title that states its message and a text for those who can't see it.

In a notebook it is an `<img>` with an SVG inside. That was chosen over inline SVG because JupyterLab strips the latter
from a notebook that it doesn't trust (one that papermill ran, say), while an `<img>` and its alternative text stay, in
JupyterLab as in the HTML that nbconvert writes. The SVG brings its own paper, light or dark, and so is readable on any
page. Which of the two follows the `color-scheme` of the `<img>` (CSS Color Adjustment 1, section 2): JupyterLab sets
it with its theme, live; a style sheet of two lines does so for nbconvert's pages and for VS Code.
"""

import base64
import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from labkit.show import theme

_FOLLOW = (
    "<style>"
    '[data-jp-theme-light="true"] .labkit-picture{color-scheme:light}'
    '[data-jp-theme-light="false"] .labkit-picture,.vscode-dark .labkit-picture{color-scheme:dark}'
    "</style>"
)
_PNG_DPI = 144
_LONG = re.compile(r"(?<=[ML] )(-?\d+\.\d\d)\d* (-?\d+\.\d\d)\d*")


@contextmanager
def drawing() -> Iterator[None]:
    """The theme's settings while a figure is made or written; the notebook's own come back after."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(theme.SETTINGS)
        yield


class Picture:
    """A matplotlib `figure` with its `title` (already in it) and `alt`, what it shows, in words and numbers.

    As the last value of a cell it is shown. `.figure` may be drawn on further; it belongs to no pyplot state.
    An empty `title` or `alt` is a ValueError.
    """

    def __init__(self, figure: Figure, title: str, alt: str) -> None:
        for name, text in (("title", title), ("alt", alt)):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"a picture needs {name}, a text that says what it shows; got {text!r}")
        self.figure, self.title, self.alt = figure, title, alt
        with (
            drawing()
        ):  # laid out once, for every drawing would move things by a hair, and takes as long as all the rest
            figure.draw_without_rendering()
            figure.set_layout_engine("none")

    def __repr__(self) -> str:
        return f"Picture: {self.words}"

    @property
    def words(self) -> str:
        """Title and alternative text together: all that a reader without the image gets."""
        return f"{_sentence(self.title)} {self.alt}"

    def svg(self) -> str:
        """The picture as SVG text, the same bytes for the same figure; dark where the page that shows it is dark."""
        file = io.BytesIO()
        with drawing():
            self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = _LONG.sub(r"\1 \2", file.getvalue().decode())  # a hundredth of a point is enough
        start = text.index("<svg")  # what stands before is the XML declaration, which no page needs
        inside = text.index(">", start) + 1
        label = f' role="img" aria-label="{html.escape(self.words)}"'
        style = f"<style>{theme.dark_rules()}</style>"
        return text[start : inside - 1] + label + ">" + style + text[inside:]

    def png(self) -> bytes:
        """The picture as PNG, in the light colours."""
        file = io.BytesIO()
        with drawing():
            self.figure.savefig(file, format="png", dpi=_PNG_DPI, metadata={"Title": self.title})
        return file.getvalue()

    def html(self) -> str:
        """The picture as a piece of HTML that needs no other file."""
        data = base64.b64encode(self.svg().encode()).decode()
        width = round(self.figure.get_figwidth() * 96)
        alt = html.escape(self.words)
        image = f'<img class="labkit-picture" width="{width}" alt="{alt}" src="data:image/svg+xml;base64,{data}">'
        return f'{_FOLLOW}<figure style="margin: 0">{image}</figure>'

    def save(self, path: str | Path) -> None:
        """Write the picture to `path`, whose name ends in .svg or .png; anything else is a ValueError."""
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(self.svg())
        elif path.suffix == ".png":
            path.write_bytes(self.png())
        else:
            raise ValueError(f"a picture is saved as .svg or .png, not as {path.name!r}")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        png = base64.b64encode(self.png()).decode()  # for what shows no HTML: PDF, some editors
        return {"text/plain": repr(self), "text/html": self.html(), "image/png": png}


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."
