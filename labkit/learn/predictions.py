"""Predictions: the learner says a number before the machine does, and sees the two side by side.

In JupyterLab `predict` shows a box to write into, or buttons to choose from. Elsewhere it shows one line and asks
nothing. Neither ever waits, so Run All goes through; an answer given afterwards still joins the measurement below.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.learn.answers import Unreadable, read_number
from labkit.learn.beside import Answer, amount, beside, factor_between
from labkit.learn.progress import kept_prediction, note_measurement, note_prediction
from labkit.learn.results import plain_value
from labkit.learn.surroundings import Place, live, show, show_text
from labkit.words import _

_KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Question:
    """What is asked under a key: a number in a unit, or one of some choices."""

    key: str
    text: str
    unit: str = ""
    choices: tuple[str, ...] = ()

    def read(self, typed: str) -> Answer:
        """The answer in what was typed or chosen; raises Unreadable."""
        return typed if self.choices else read_number(typed, self.unit)


@dataclass
class Revealed:
    """A measurement that is on the page already, and where."""

    place: Place
    measured: Answer


_asked: dict[str, Question] = {}
_revealed: dict[str, Revealed] = {}


def predict(key: str, question: str, *, unit: str = "", choices: Sequence[str] | None = None) -> None:
    """Ask the learner for a prediction, as `predict("ring-bytes", "How many bytes does a rank send?", unit="bytes")`.

    The answer is one number in `unit`, or one of `choices` (at least two texts), and is kept with the learner's
    progress under `key`, a slug; running the cell again shows it. Never waits. Raises ValueError for a malformed call.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"predict: {key!r} is no key; use lower-case letters, digits and hyphens, as in 'ring-bytes'")
    options = tuple(choices or ())
    if choices is not None and (isinstance(choices, str) or len(set(options)) < 2 or len(set(options)) < len(options)):
        raise ValueError(f"predict {key!r}: choices must be two or more different texts, not {choices!r}")
    asked = Question(key, _(question), unit, options)
    kept = _fitting(asked)
    # the answer of an earlier day stands as it is; whoever runs the cell once more wants to change it
    open_to_change = kept is None or key in _asked
    _asked[key] = asked
    if live() and open_to_change:
        from labkit.learn.prediction_widget import ask

        show_text(f"**{_('Predict')}.** {asked.text}")
        ask(asked.text, unit, options, None if kept is None else kept["value"], lambda typed: keep(asked, typed))
    else:
        show_text(_line(asked, kept))


def reveal(key: str, measured: Any, *, unit: str | None = None) -> None:
    """Set the measurement beside the prediction that was made under `key`, as `reveal("ring-bytes", 1.5)`.

    `measured` is one number (scalar tensors are converted), or for a choice its text, or a truth value for yes and no.
    Its unit is the one of the question unless given. With no prediction it shows the measurement alone. Never judges,
    never waits.
    """
    value = plain_value(key, measured)
    if isinstance(value, bool):
        value = "yes" if value else "no"
    answer: Answer = value if isinstance(value, str) else float(value)
    asked = _asked.get(key) or Question(key, "", "")
    if unit is not None or key not in _asked:
        asked = Question(key, asked.text, unit or "", asked.choices)
    _asked[key] = asked
    kept = _fitting(asked)
    if kept is not None:
        note_measurement(key, answer, factor_between(kept["value"], answer))
    bundle = _beside(asked, kept, answer)
    if live():
        _revealed[key] = Revealed(Place(bundle), answer)
    else:
        show(bundle)


def keep(asked: Question, typed: str) -> tuple[bool, str]:
    """Keep what the learner typed or chose; returns whether it was kept, and what to say. Nonsense is answered."""
    try:
        value = asked.read(typed)
    except Unreadable as refusal:
        return False, str(refusal)
    shown, kept = _revealed.get(asked.key), _fitting(asked)
    if kept is None or kept["value"] != value:
        note_prediction(asked.key, value, asked.unit, after_measurement=shown is not None)
        kept = {"value": value, "after_measurement": shown is not None}
        if shown is not None:
            note_measurement(asked.key, shown.measured, factor_between(value, shown.measured))
            shown.place.update(_beside(asked, kept, shown.measured))
    where = _("It stands beside the measurement below.") if shown is not None else _("Now run the cells below.")
    return True, f"{_kept(asked, kept)} {where} {_change()}"


def _fitting(asked: Question) -> dict[str, Any] | None:
    """The kept answer, unless the question has changed its kind since."""
    kept = kept_prediction(asked.key)
    if kept is None or not isinstance(kept["value"], (str, int, float)):
        return None
    if asked.choices:
        return kept if kept["value"] in asked.choices else None
    # a measurement whose question was not asked in this kernel takes what there is
    return kept if not asked.text or not isinstance(kept["value"], str) else None


def _beside(asked: Question, kept: dict[str, Any] | None, measured: Answer) -> dict[str, str]:
    remark = ""
    if kept is not None and kept.get("after_measurement"):
        remark = _("The answer was given after the measurement was shown.")
    elif kept is None and live():
        remark = _("You can still answer above.")
    return beside(asked.text, None if kept is None else kept["value"], measured, asked.unit, remark=remark)


def _kept(asked: Question, kept: dict[str, Any]) -> str:
    return _("Your prediction: **{answer}**.").format(answer=amount(kept["value"], asked.unit))


def _change() -> str:
    return _("Run this cell again to change it.")


def _line(asked: Question, kept: dict[str, Any] | None) -> str:
    line = f"**{_('Predict')}.** {asked.text}"
    if kept is not None:
        return f"{line} {_kept(asked, kept)}{' ' + _change() if live() else ''}"
    if asked.choices:
        return f"{line} {_('One of: {choices}.').format(choices='; '.join(asked.choices))}"
    return f"{line} {_('A number, in {unit}.').format(unit=asked.unit)}" if asked.unit else line
