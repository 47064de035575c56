"""Bits to toggle: a button for each bit of a number, under a picture that says what they make; with its still twin."""

import html
from typing import Any

import ipywidgets
from IPython.core.getipython import get_ipython
from IPython.display import display

from labkit.precision import FORMATS
from labkit.show.bit_row import format_named, landmarks, number_bits
from labkit.show.still_twin import Still
from labkit.words import _


def explore_bits(*, title: str, form: str = "bfloat16", pattern: int | None = None) -> None:
    """Show a number of a format by its bits, with a button for each bit and a menu of formats where a kernel is live.

    `form` is a name in `labkit.precision.FORMATS`, `pattern` what is shown first (one if not given), `title` what to
    try. The picture stays in the notebook, with a few other patterns to unfold. An unknown format or a pattern that is
    too long is a ValueError.
    """
    chosen = format_named(form)
    first = landmarks(chosen)[_("one")] if pattern is None else pattern
    still = Still(title, number_bits(first, chosen), "", _twins(form))
    handle = display(still, display_id=True)
    if getattr(get_ipython(), "kernel", None) is None or handle is None:
        return

    def redraw(name: str, value: int) -> None:
        handle.update(Still(title, number_bits(value, format_named(name)), "", still.twins))

    bundle = BitPanel(form, first, redraw).box._repr_mimebundle_()
    bundle["text/plain"] = _("(Controls, live in Jupyter: a button for each bit, and the format.)")
    display(bundle, raw=True)


class BitPanel:
    """A menu of formats and a row of buttons; `changed(format, pattern)` is called when one was pressed."""

    def __init__(self, form: str, pattern: int, changed: Any) -> None:
        self.changed = changed
        self.menu = ipywidgets.Dropdown(options=list(FORMATS), value=form, description=_("format"))
        self.row = ipywidgets.HBox(layout={"flex_flow": "row wrap"})
        self.box = ipywidgets.VBox([self.menu, self.row])
        self._fill(pattern)
        self.menu.observe(self._other_format, names="value")

    @property
    def pattern(self) -> int:
        """What the buttons say."""
        return int("".join(button.description for button in self.row.children), 2)

    def _fill(self, pattern: int) -> None:
        form = format_named(self.menu.value)
        buttons = []
        for index, bit in enumerate(f"{pattern:0{form.bits}b}"):
            first = {0: _("sign"), 1: _("exponent"), 1 + form.exponent_bits: _("mantissa")}
            field = first[max(one for one in first if one <= index)]
            gap = 9 if index in (0, form.exponent_bits) else 1
            button = ipywidgets.ToggleButton(
                value=bit == "1",
                description=bit,
                tooltip=_("bit {number}, {field}").format(number=form.bits - 1 - index, field=field),
                layout={"width": "1.9em", "padding": "0", "margin": f"1px {gap}px 1px 1px"},
            )
            button.observe(self._toggled, names="value")
            buttons.append(button)
        self.row.children = buttons

    def _toggled(self, change: Any) -> None:
        change["owner"].description = "1" if change["new"] else "0"
        self.changed(self.menu.value, self.pattern)

    def _other_format(self, _change: Any) -> None:
        first = landmarks(format_named(self.menu.value))[_("one")]
        self._fill(first)
        self.changed(self.menu.value, first)


def _twins(form: str) -> str:
    chosen = format_named(form)
    shown = "".join(
        f"<p><strong>{html.escape(name)}</strong></p>{number_bits(pattern, chosen).html()}"
        for name, pattern in landmarks(chosen).items()
    )
    return f"<details><summary>{html.escape(_('Other patterns'))}</summary>{shown}</details>"
