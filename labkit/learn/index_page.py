"""`build/index.html`: every lesson that ran with its first picture, how it went, and the table of results."""

import html
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat

from labkit.learn.collecting import pictures_of
from labkit.learn.lessons import Lesson
from labkit.learn.running import LessonRun
from labkit.learn.tables import table_rows
from labkit.words import _

STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem; padding: 0; }
li { list-style: none; border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; }
li.failed { border: 2px solid #d55e00; }
li img { width: 100%; height: 12rem; object-fit: contain; background: white; border-radius: .25rem; }
h2 { font-size: 1.1rem; margin: .5rem 0 0; }
p { margin: .25rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .6rem; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def export_html(notebook: Path) -> Path:
    """The executed notebook as one HTML file beside it, pictures inside."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="lab", require_js_url="")
    body, _resources = exporter.from_filename(str(notebook))
    target = notebook.with_suffix(".html")
    target.write_text(body, encoding="utf-8")
    return target


def write_index(runs: Sequence[LessonRun], lessons: Mapping[str, Lesson], folder: Path) -> Path:
    """Write `index.html` into `folder`, each run's notebook as HTML beside it, and its first picture in `pictures/`.

    The page needs nothing from the network. `lessons` gives each run's lesson by name.
    """
    cards = "\n".join(_card(run, lessons[run.lesson], folder) for run in runs)
    failed = sum(not run.ok for run in runs)
    summary = _("Runs: {count}. Failed: {failed}. Time: {seconds:.0f} s.").format(
        count=len(runs), failed=failed, seconds=sum(run.seconds for run in runs)
    )
    title = _("The workbook, executed")
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{STYLE}</style>
<h1>{html.escape(title)}</h1>
<p>{html.escape(summary)} <a href="results.csv">results.csv</a> · <a href="results.json">results.json</a></p>
<ol>
{cards}
</ol>
<h1>{html.escape(_("Results"))}</h1>
{_table(runs)}
</html>
"""
    target = folder / "index.html"
    target.write_text(page, encoding="utf-8")
    return target


def _card(run: LessonRun, lesson: Lesson, folder: Path) -> str:
    notebook = Path(run.notebook)
    picture = ""
    links = ""
    if notebook.exists():
        pictures = pictures_of(nbformat.read(notebook, as_version=4))
        if pictures:
            file = folder / "pictures" / f"{notebook.stem}.{pictures[0].ending}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pictures[0].data)
            alt = pictures[0].alt or _("The first picture of {title}").format(title=lesson.title)
            picture = f'<img loading="lazy" src="{_link(file, folder)}" alt="{html.escape(alt)}">'
        page = export_html(notebook)
        links = f'<a href="{_link(page, folder)}">{html.escape(_("read"))}</a> · '
        links += f'<a href="{_link(notebook, folder)}">{html.escape(notebook.name)}</a>'
    status = html.escape(run.error) if run.error else html.escape(_("ok"))
    given = ", ".join(f"{name}={value}" for name, value in run.given.items())
    took = _("{seconds:.1f} s, {results} results").format(seconds=run.seconds, results=len(run.results))
    return f"""<li class="{run.status}">{picture}
<h2>{html.escape(lesson.number)} {html.escape(lesson.title)}</h2>
<p>{html.escape(given)}</p>
<p>{status} · {html.escape(took)}</p>
<p>{links}</p></li>"""


def _link(target: Path, folder: Path) -> str:
    return urllib.parse.quote(Path(os.path.relpath(target, folder.absolute())).as_posix())


def _table(runs: Sequence[LessonRun]) -> str:
    rows = [row for row in table_rows(runs) if row["name"]]
    if not rows:
        return f"<p>{html.escape(_('No lesson has emitted a result.'))}</p>"
    names = [name for name in rows[0] if name not in ("status", "seconds", "error")]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "\n".join("<tr>" + "".join(_data(row[name]) for name in names) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _data(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            f'<td class="number">{value:.6g}</td>' if isinstance(value, float) else f'<td class="number">{value}</td>'
        )
    return f"<td>{html.escape(str(value))}</td>"
