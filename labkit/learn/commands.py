"""The subcommands of `labkit` that deal with lessons: lab, lessons, run, sweep, workspace."""

import argparse
import functools
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.learn.lessons import NOTEBOOKS, ROOT, Lesson, LessonError, all_lessons, find_lesson
from labkit.learn.parameters import alternate_values, read_assignments, read_axes
from labkit.learn.workspace import Delivery, update_workspace, workspace_folder
from labkit.words import _

BUILD = ROOT / "build"
PROFILES = ("quick", "lab", "gpu")


def _refusing(command: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """What can't be done ends in its sentence and exit code 2."""

    @functools.wraps(command)
    def wrapped(arguments: Sequence[str]) -> int:
        try:
            return command(arguments)
        except LessonError as error:
            print(f"labkit: {error}", file=sys.stderr)
            return 2

    return wrapped


def _add_common(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("-p", metavar="KEY=VALUE", dest="parameters", action="append", default=[], help=help)
    parser.add_argument("--cell-timeout", type=float, metavar="SECONDS", help="give up on a cell that takes longer")


@_refusing
def lessons_command(arguments: Sequence[str]) -> int:
    """List the lessons with their minutes and parameters."""
    parser = argparse.ArgumentParser(prog="labkit lessons", description=lessons_command.__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    lessons = all_lessons()
    if parser.parse_args(arguments).json:
        print(json.dumps([_as_dict(lesson) for lesson in lessons], indent=1))
        return 0
    for lesson in lessons:
        minutes = ", ".join(f"{name} {lesson.minutes[name]:g}" for name in PROFILES if name in lesson.minutes)
        needs = _(" (after {lessons})").format(lessons=", ".join(lesson.needs)) if lesson.needs else ""
        print(f"{lesson.name}: {lesson.title}{needs}")
        print(_("    minutes: {minutes}").format(minutes=minutes or "?"))
        for parameter in lesson.parameters:
            print(f"    -p {parameter.name}={parameter.default}  {parameter.type}  {parameter.help}".rstrip())
    if not lessons:
        print(_("There are no lessons in {folder}.").format(folder=NOTEBOOKS))
    return 0


def _as_dict(lesson: Lesson) -> dict[str, Any]:
    parameters = [vars(parameter) for parameter in lesson.parameters]
    about = {"lesson": lesson.number, "name": lesson.name, "title": lesson.title, "minutes": lesson.minutes}
    return about | {"needs": lesson.needs, "parameters": parameters}


@_refusing
def run_command(arguments: Sequence[str]) -> int:
    """Execute lessons, all of them where none is named: one line each, then executed notebooks, index.html, and
    results.csv and results.json in the output folder."""
    parser = argparse.ArgumentParser(prog="labkit run", description=run_command.__doc__)
    parser.add_argument("lessons", nargs="*", metavar="LESSON", help="number, name, or path of a notebook")
    _add_common(parser, "a parameter of the lessons, as in -p world_size=4")
    parser.add_argument("--alternate", action="store_true", help="with each further set of parameters a lesson names")
    parser.add_argument("--out", type=Path, default=BUILD, help="the output folder (build)")
    asked = parser.parse_args(arguments)
    lessons = [find_lesson(name) for name in asked.lessons] if asked.lessons else all_lessons()
    jobs: list[tuple[Lesson, dict[str, Any]]] = []
    for lesson in lessons:  # all are checked before the first one runs
        given = read_assignments(lesson, asked.parameters)
        jobs += [(lesson, {**values, **given}) for values in (alternate_values(lesson) if asked.alternate else [{}])]
    if not jobs:
        raise LessonError(_("There is no lesson to run in {folder}.").format(folder=NOTEBOOKS))
    return _run_jobs(jobs, asked.out, asked.cell_timeout)


def _run_jobs(jobs: Sequence[tuple[Lesson, dict[str, Any]]], out: Path, cell_timeout: float | None) -> int:
    from labkit.learn.index_page import write_index
    from labkit.learn.running import run_lesson, run_name
    from labkit.learn.tables import write_tables

    runs = []
    width = max(len(run_name(lesson, given)) for lesson, given in jobs)
    for lesson, given in jobs:
        name = run_name(lesson, given)
        if sys.stdout.isatty():
            print(f"{name:<{width}}  ...", end="\r", flush=True)
        run = run_lesson(lesson, given, out / "notebooks", cell_timeout=cell_timeout)
        runs.append(run)
        how = _("{count} results").format(count=len(run.results)) if run.ok else run.error
        print(f"{name:<{width}}  {run.status:<6}  {run.seconds:6.1f} s  {how}", flush=True)
        write_tables(runs, out)
    index = write_index(runs, {lesson.name: lesson for lesson, _given in jobs}, out)
    print(
        _("{index} shows what came out; the numbers are in results.csv and results.json beside it").format(index=index)
    )
    failed = sum(not run.ok for run in runs)
    print(f"{len(runs) - failed} passed, {failed} failed")
    return 1 if failed else 0


@_refusing
def sweep_command(arguments: Sequence[str]) -> int:
    """Execute one lesson for every combination of the values given; an interrupted sweep goes on where it was."""
    parser = argparse.ArgumentParser(
        prog="labkit sweep",
        description=sweep_command.__doc__,
        epilog="example: labkit sweep 04 -p world_size=1,2,4 -p bucket_cap_mb=1,5,25",
    )
    parser.add_argument("lesson", metavar="LESSON", help="number, name, or path of a notebook")
    _add_common(parser, "a parameter's values, as in -p world_size=1,2,4")
    parser.add_argument("--out", type=Path, help="the output folder (build/sweep/LESSON)")
    parser.add_argument("--again", action="store_true", help="run finished combinations too")
    asked = parser.parse_args(arguments)
    lesson = find_lesson(asked.lesson)
    axes = read_axes(lesson, asked.parameters)
    if not axes:
        raise LessonError(_("A sweep needs at least one parameter with its values, as in -p world_size=1,2,4."))
    from labkit.learn.sweep_picture import draw_sweep
    from labkit.learn.sweeping import sweep

    out = asked.out or BUILD / "sweep" / lesson.name
    runs = sweep(lesson, axes, out, again=asked.again, cell_timeout=asked.cell_timeout)
    alt = draw_sweep(runs, axes, out / "sweep.png")
    for run in runs:
        if not run.ok:
            print(_("failed: {given}: {error}").format(given=run.given, error=run.error))
    files = ["results.csv", "results.json", *(["sweep.png"] if alt else []), "notebooks/"]
    print(_("{folder}: {files}").format(folder=out, files=", ".join(files)))
    if alt:
        print(alt)
    failed = sum(not run.ok for run in runs)
    print(f"{len(runs) - failed} passed, {failed} failed")
    return 1 if failed else 0


@_refusing
def workspace_command(arguments: Sequence[str]) -> int:
    """Make or update the learner's copies of the lessons; whatever the learner has changed stays as it is."""
    argparse.ArgumentParser(prog="labkit workspace", description=workspace_command.__doc__).parse_args(arguments)
    folder = workspace_folder()
    _tell(update_workspace(folder))
    print(_("The lessons to work in are in {folder}.").format(folder=folder))
    return 0


def _tell(deliveries: Sequence[Delivery]) -> None:
    news = [delivery.sentence() for delivery in deliveries if delivery.what == "beside"]
    for sentence in news:
        print(textwrap.indent(sentence, "labkit: "))


@_refusing
def lab_command_line(arguments: Sequence[str]) -> int:
    """Bring the workspace up to date and open JupyterLab on the first lesson, or on the one named."""
    from labkit.learn.opening import open_lab

    parser = argparse.ArgumentParser(prog="labkit lab", description=lab_command_line.__doc__)
    parser.add_argument("lesson", nargs="?", help="number or name; the first without it")
    parser.add_argument("--port", type=int, help="the port to listen on (the first free one from 8888)")
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    asked = parser.parse_args(arguments)
    lessons = all_lessons()
    if not lessons:
        raise LessonError(_("There are no lessons in {folder}.").format(folder=NOTEBOOKS))
    lesson = find_lesson(asked.lesson) if asked.lesson else lessons[0]
    folder = workspace_folder()
    _tell(update_workspace(folder))
    open_lab(folder, folder / lesson.path.name, port=asked.port, browser=False if asked.no_browser else None)
    return 0
