"""The small widget that asks for a prediction in JupyterLab: a box with a button, or one button a choice.

Once an answer is kept, words take the widget's place: a notebook that is opened again later shows them, whereas a
widget needs the kernel that made it.
"""

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets
from IPython.display import display

from labkit.words import _

Keep = Callable[[str], tuple[bool, str]]


def ask(question: str, unit: str, choices: tuple[str, ...], kept: float | str | None, keep: Keep) -> None:
    """Show the widget. What is typed or chosen goes to `keep`, which says whether it was kept, and what to show."""
    reply = ipywidgets.HTML()
    reply.layout.margin = "0 0 0 2px"

    def take(typed: str) -> None:
        done, text = keep(typed)
        if done:
            place.update({"text/markdown": text, "text/plain": text}, raw=True)
        else:
            reply.value = f'<span role="status">{escape(text)}</span>'

    entry = _buttons(choices, kept, take) if choices else _box(question, unit, kept, take)
    place: Any = display(ipywidgets.VBox([entry, reply]), display_id=True)


def _box(question: str, unit: str, kept: float | str | None, take: Callable[[str], None]) -> Any:
    box = ipywidgets.Text(
        value="" if kept is None else f"{kept:.12g}",
        placeholder=_("your guess, as 1.5, 3/2 or 2e6"),
        tooltip=question,
        continuous_update=False,  # the value arrives with Enter or when the box is left
    )
    button = ipywidgets.Button(description=_("Keep"), tooltip=_("Keep this prediction"))
    button.layout.width = "auto"
    box.observe(lambda change: take(change["new"]), names="value")
    button.on_click(lambda _button: take(box.value))
    return ipywidgets.HBox([box, ipywidgets.Label(unit), button])


def _buttons(choices: tuple[str, ...], kept: float | str | None, take: Callable[[str], None]) -> Any:
    buttons = ipywidgets.ToggleButtons(
        options=[(_(choice), choice) for choice in choices], value=kept, style={"button_width": "auto"}
    )
    if kept is not None:
        # to choose the same once more is no change, which a widget would not tell of
        again = ipywidgets.Button(description=_("Keep"), tooltip=_("Keep this prediction"))
        again.layout.width = "auto"
        again.on_click(lambda _button: take(buttons.value))
    buttons.observe(lambda change: take(change["new"]), names="value")
    return buttons if kept is None else ipywidgets.HBox([buttons, again])
