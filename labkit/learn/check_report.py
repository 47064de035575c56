"""How a check's report looks: a table in a notebook, lines of text elsewhere. No meaning hangs on colour alone."""

from html import escape

from labkit.learn.checking import Line, Report
from labkit.learn.exercises import Exercise
from labkit.words import _

_CELL = "text-align:left;vertical-align:top;padding:3px 10px;white-space:normal"
_MARKS = {"passed": "✓", "failed": "✗", "not reached": "–"}


def waiting(exercise: Exercise) -> dict[str, str]:
    """What stands there while the check runs."""
    text = _("Checking {title}: at most {seconds:g} seconds …").format(
        title=_(exercise.title), seconds=exercise.seconds
    )
    return {"text/html": f"<p>{escape(text)}</p>", "text/plain": text}


def render(report: Report) -> dict[str, str]:
    """The report as output by MIME type."""
    closing = _closing(report)
    head = f"{_(report.exercise.title)}: {_verdict(report)}"
    if report.untouched:
        return {"text/html": f"<p><b>{escape(head)}</b> {escape(closing)}</p>", "text/plain": f"{head} {closing}"}
    rows = "".join(_row(line, len(report.exercise.trials)) for line in report.lines)
    titles = "".join(
        f'<th scope="col" style="{_CELL}">{escape(title)}</th>' for title in (_("property"), _("wanted"), _("measured"))
    )
    table = (
        f'<table style="margin:4px 0;max-width:60em"><thead><tr><th scope="col" style="{_CELL}">{escape(_("verdict"))}'
        f"</th>{titles}</tr></thead><tbody>{rows}</tbody></table>"
    )
    plain = [head, *(_text(line) for line in report.lines), closing]
    details = "".join(_details(line) for line in report.failed if line.details)
    return {
        "text/html": f"<div><p><b>{escape(head)}</b></p>{table}{details}<p>{escape(closing)}</p></div>",
        "text/plain": "\n".join(filter(None, plain)),
    }


def _status(line: Line) -> str:
    words = {"passed": _("passed"), "failed": _("failed"), "not reached": _("not reached")}
    return f"{_MARKS[line.status]} {words[line.status]}"


def _row(line: Line, trials: int) -> str:
    cells = [escape(line.statement), "", ""]
    if line.status == "failed":
        where = _("first seen with {trial}").format(trial=line.trial)
        measured = f"{escape(line.finding.measured)}<br><small>{escape(where)}</small>"
        if line.finding.cause:
            cause = _("Likely cause: {cause}.").format(cause=line.finding.cause)
            measured += f"<br><b>{escape(cause)}</b>"
        cells = [escape(line.statement), escape(line.finding.wanted), measured]
    elif line.status == "passed":
        whole = _("in all {trials} trials") if line.trials == trials else _("in the {trials} trials that ran")
        cells[2] = escape(whole.format(trials=line.trials))
    weight = "bold" if line.status == "failed" else "normal"
    first = f'<th scope="row" style="{_CELL};font-weight:{weight};white-space:nowrap">{escape(_status(line))}</th>'
    return f"<tr>{first}" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _text(line: Line) -> str:
    text = f"  {_status(line)}: {line.statement}"
    if line.status == "failed":
        parts = _("wanted {wanted}, measured {measured} (first seen with {trial})")
        finding = line.finding
        text += "\n    " + parts.format(wanted=finding.wanted, measured=finding.measured, trial=line.trial)
        if finding.cause:
            text += "\n    " + _("Likely cause: {cause}.").format(cause=finding.cause)
    return text


def _details(line: Line) -> str:
    summary = escape(_("Where it happened"))
    return f"<details><summary>{summary}</summary><pre>{escape(line.details)}</pre></details>"


def _verdict(report: Report) -> str:
    if report.untouched:
        return _("not tried yet.")
    holds = sum(line.status == "passed" for line in report.lines)
    if report.passed:
        return _("all {count} properties hold").format(count=len(report.lines))
    return _("{holds} of {count} properties hold").format(holds=holds, count=len(report.lines))


def _closing(report: Report) -> str:
    if report.untouched:
        text = _("Write your answer in place of “raise NotImplementedError”, run that cell, then this check.")
    elif report.passed:
        return ""
    else:
        text = _("Change it and check again as often as you like.")
    return text + " " + _('hint("{id}") gives a hint.').format(id=report.exercise.id)
