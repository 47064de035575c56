"""Pictures to play with, which are also there for those who can't: each has a still twin.

The picture is an ordinary output of the cell, so papermill, nbconvert and a printed page have it, with a few other
values to unfold. Where a kernel is live, sliders under it redraw that same output.
"""

import html
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
from IPython.core.getipython import get_ipython
from IPython.display import display

from labkit.show.picture import Picture
from labkit.words import _

_TWINS = 4  # other values to unfold; each costs a drawing

Control = tuple[float, ...] | list[Any] | bool


def explore(function: Callable[..., Picture], *, title: str, **controls: Control) -> None:
    """Show `function(**values)`, a Picture, with a control for each keyword, and its still twin in any case.

    A control is `(least, most)` or `(least, most, step)`, a slider; a list, a menu; or a bool, a tick box. It starts at
    the function's own default for that argument, else at the least, the first, or the bool. `title` says what to try.
    The picture is drawn anew when a slider is let go. Where the function raises a ValueError, its sentence is shown.
    A control that is none of these, or an argument that the function lacks, is a ValueError.
    """
    start = _starting_values(function, controls)
    still = Still(title, *_draw(function, start), _twins(function, controls, start))
    handle = display(still, display_id=True)
    if getattr(get_ipython(), "kernel", None) is None or handle is None:
        return

    def redraw(values: Mapping[str, Any]) -> None:
        handle.update(Still(title, *_draw(function, values), still.twins))

    bundle = panel(controls, start, redraw)._repr_mimebundle_()
    bundle["text/plain"] = _("(Controls, live in Jupyter: {names}.)").format(names=", ".join(map(_label, controls)))
    display(bundle, raw=True)


class Still:
    """What stays in the notebook: a heading, the picture or a sentence, and `twins`, HTML of a few more to unfold."""

    def __init__(self, title: str, picture: Picture | None, sentence: str, twins: str) -> None:
        self.title, self.picture, self.sentence, self.twins = title, picture, sentence, twins

    def __repr__(self) -> str:
        return f"{self.title}\n{self.picture or self.sentence}"

    def _repr_mimebundle_(self, **_keywords: Any) -> dict[str, Any]:
        body = self.picture.html() if self.picture else f"<p>{html.escape(self.sentence)}</p>"
        body = f"<p><strong>{html.escape(self.title)}</strong></p>{body}{self.twins}"
        bundle = {"text/plain": repr(self), "text/html": body}
        if self.picture:
            bundle["image/png"] = self.picture._repr_mimebundle_()["image/png"]
        return bundle


def panel(
    controls: Mapping[str, Control], start: Mapping[str, Any], changed: Callable[[Mapping[str, Any]], None]
) -> ipywidgets.VBox:
    """The controls, which call `changed` with all values when one of them was changed and let go."""
    widgets = {name: _widget(name, control, start[name]) for name, control in controls.items()}

    def on_change(_change: Any) -> None:
        changed({name: widget.value for name, widget in widgets.items()})

    for widget in widgets.values():
        widget.observe(on_change, names="value")
    return ipywidgets.VBox(list(widgets.values()))


def _widget(name: str, control: Control, value: Any) -> Any:
    options: dict[str, Any] = {"description": _label(name), "value": value, "style": {"description_width": "12em"}}
    if isinstance(control, bool):
        return ipywidgets.Checkbox(**options)
    if isinstance(control, list):
        return ipywidgets.Dropdown(options=control, **options)
    options |= {"min": control[0], "max": control[1], "continuous_update": False, "layout": {"width": "36em"}}
    if all(isinstance(number, int) for number in (*control, value)):
        return ipywidgets.IntSlider(step=control[2] if len(control) == 3 else 1, **options)
    step = control[2] if len(control) == 3 else (control[1] - control[0]) / 100
    return ipywidgets.FloatSlider(step=step, readout_format=".4g", **options)


def _label(name: str) -> str:
    return name.replace("_", " ")


def _starting_values(function: Callable[..., Picture], controls: Mapping[str, Control]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    start: dict[str, Any] = {}
    for name, control in controls.items():
        if name not in parameters and not open_ended:
            raise ValueError(f"explore has a control {name!r}, but the function takes {', '.join(parameters)}")
        first = _ends(name, control)[0]
        own = parameters[name].default if name in parameters else inspect.Parameter.empty
        start[name] = own if own is not inspect.Parameter.empty and _holds(control, own) else first
    return start


def _ends(name: str, control: Control) -> list[Any]:
    """The values of a control that its still twin shows."""
    if isinstance(control, bool):
        return [control, not control]
    if isinstance(control, list) and control:
        return control
    if isinstance(control, tuple) and len(control) in (2, 3) and control[0] < control[1]:
        return [control[0], control[1]]
    raise ValueError(f"the control {name!r} is (least, most), (least, most, step), a list or a bool; got {control!r}")


def _holds(control: Control, value: Any) -> bool:
    if isinstance(control, bool):
        return isinstance(value, bool)
    return value in control if isinstance(control, list) else control[0] <= value <= control[1]


def _draw(function: Callable[..., Picture], values: Mapping[str, Any]) -> tuple[Picture | None, str]:
    """The picture, or none and the sentence why."""
    try:
        picture = function(**values)
    except ValueError as error:
        return None, str(error)
    if not isinstance(picture, Picture):
        raise TypeError(f"explore needs a function that returns a Picture; it returned {type(picture).__name__}")
    return picture, ""


def _twins(function: Callable[..., Picture], controls: Mapping[str, Control], start: Mapping[str, Any]) -> str:
    """The picture with one control changed, a few times, as HTML to unfold: the ends of each control in turn."""
    ends = {name: [v for v in _ends(name, control) if v != start[name]] for name, control in controls.items()}
    turns = [(name, values[turn]) for turn in range(_TWINS) for name, values in ends.items() if turn < len(values)]
    shown = ""
    for name, value in turns[:_TWINS]:
        picture, _sentence = _draw(function, {**start, name: value})
        if picture:
            shown += f"<p><strong>{html.escape(f'{_label(name)} = {value}')}</strong></p>{picture.html()}"
    return (
        f"<details><summary>{html.escape(_('The same with other values'))}</summary>{shown}</details>" if shown else ""
    )
