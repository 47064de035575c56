"""Prose with computed numbers: `say` renders a sentence through gettext, so that it can be translated."""

import contextlib
import string
from collections.abc import Mapping
from typing import Any

from labkit.learn.surroundings import show_text
from labkit.words import _


def say(template: str, /, **values: Any) -> None:
    """Show a sentence in Markdown with its numbers filled in, as `say("Each rank sent {x:.2f} tensors.", x=1.5)`.

    `template` is a format string and the key of its translation. In a notebook it is shown as Markdown, elsewhere
    printed. A ValueError names a value that is missing, unused or does not fit its format.
    """
    text = _filled(template, values)
    translated = _(template)
    if translated != template:
        # a slip in a translation must not stop a lesson: English stands
        with contextlib.suppress(ValueError):
            text = _filled(translated, values)
    show_text(text)


def _filled(template: str, values: Mapping[str, Any]) -> str:
    named = _names(template, template)
    for name in sorted(named - values.keys()):
        raise ValueError(f"say: the text names {{{name}}}, but there is no such value; give it as say(..., {name}=...)")
    for name in sorted(values.keys() - named):
        raise ValueError(f"say: the value {name!r} is not used; write {{{name}}} into the text, or leave the value out")
    try:
        return template.format(**values)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"say: a value does not fit its place in {template!r} ({error})") from None


def _names(template: str, whole: str) -> set[str]:
    """The names that a format string uses, those inside format specifications included."""
    names: set[str] = set()
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"say: the braces of {whole!r} do not match ({error}); write {{{{ for a brace") from None
    for _literal, field, specification, _conversion in parts:
        if field is None:
            continue
        name = field.split(".")[0].split("[")[0]
        if not name.isidentifier():
            raise ValueError(f"say: {{{field}}} has no name; write {{x}} and give x=..., or {{{{ for a brace")
        names.add(name)
        names |= _names(specification or "", whole)
    return names
