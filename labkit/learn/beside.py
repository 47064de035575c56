"""The picture of a prediction beside its measurement: two bars, and the error as a factor. It never judges."""

from html import escape

from labkit.learn.answers import write_number
from labkit.words import _

Answer = float | str

_BAR = (
    "height:0.9em;min-width:2px;width:{percent:.1f}%;box-sizing:border-box;border:2px solid currentColor;"
    "background-color:{fill}"
)
_CELL = "text-align:left;padding:2px 16px 2px 0;background-color:transparent;white-space:nowrap"


def factor_between(predicted: Answer, measured: Answer) -> float | None:
    """predicted / measured, or None where a ratio says nothing: words, zero, or opposite signs."""
    if isinstance(predicted, str) or isinstance(measured, str):
        return None
    if predicted * measured <= 0:
        return 1.0 if predicted == measured else None
    return predicted / measured


def amount(value: Answer, unit: str) -> str:
    """A number with its unit, or an answer in words."""
    if isinstance(value, str):
        return value
    number = write_number(value)
    return f"{number} {unit}" if unit else number


def comparison(predicted: Answer, measured: Answer, unit: str) -> str:
    """In one sentence, how far apart the two are."""
    if isinstance(predicted, str) or isinstance(measured, str):
        return _("The two agree.") if predicted == measured else _("The two differ.")
    factor = factor_between(predicted, measured)
    if factor is None:
        return _("They are {difference} apart.").format(difference=amount(abs(predicted - measured), unit))
    if f"{factor:.2f}" == "1.00":
        return _("The two agree: factor 1.00.")
    if factor > 1:
        text = _("Factor {factor}: the prediction is {factor} times the measurement.")
        return text.format(factor=_short(factor))
    text = _("Factor {factor}: the measurement is {factor} times the prediction.")
    return text.format(factor=_short(1 / factor))


def _short(factor: float) -> str:
    return f"{factor:.2f}" if factor < 100 else write_number(float(f"{factor:.3g}"))


def beside(question: str, predicted: Answer | None, measured: Answer, unit: str, *, remark: str = "") -> dict[str, str]:
    """The two as output by MIME type: a small table with bars, and the same in plain text."""
    rows = [(_("measured"), measured, "currentColor")]
    sentences = []
    if predicted is None:
        text = _("No prediction was made. Predicting first would have been possible; a guess makes the number stick.")
        sentences.append(text)
    else:
        rows.insert(0, (_("predicted"), predicted, "transparent"))
        sentences.append(comparison(predicted, measured, unit))
    if remark:
        sentences.append(remark)
    sizes = [abs(value) for _name, value, _fill in rows if not isinstance(value, str)]
    longest = max(sizes, default=0.0)
    html, plain = [], []
    for name, value, fill in rows:
        bar = ""
        if len(sizes) == 2 and not isinstance(value, str) and longest > 0:
            style = _BAR.format(percent=100 * abs(value) / longest, fill=fill)
            bar = f'<td style="{_CELL};min-width:20em"><div style="{style}"></div></td>'
        html.append(
            f'<tr style="background-color:transparent"><th scope="row" style="{_CELL};font-weight:normal">'
            f'{escape(name)}</th><td style="{_CELL};font-weight:bold">{escape(amount(value, unit))}</td>{bar}</tr>'
        )
        plain.append(f"{name}: {amount(value, unit)}")
    table = f'<table style="margin:0">{"".join(html)}</table>'
    above, below = (f'<p style="margin:2px 0">{escape(text)}</p>' for text in (question, " ".join(sentences)))
    return {
        "text/html": f"<div>{above}{table}{below}</div>",
        "text/plain": "\n".join(filter(None, [question, *plain, *sentences])),
    }
