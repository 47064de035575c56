"""Run one lesson with papermill, and say how it went: its results, its time, its error, what it left behind."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from labkit.learn.collecting import failure_of, results_of
from labkit.learn.leftovers import end_leftovers, marked
from labkit.learn.lessons import Lesson
from labkit.learn.parameters import all_values, check_values
from labkit.words import _


@dataclass
class LessonRun:
    """One execution of a lesson.

    `given` are the parameters that were asked for, `parameters` all with their values. `status` is "ok" or "failed",
    with the reason in `error`. Each of `results` has name, value, unit and cell. `notebook` is the executed copy.
    """

    lesson: str
    given: dict[str, Any]
    parameters: dict[str, Any]
    notebook: str
    status: str = "ok"
    error: str = ""
    seconds: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_name(lesson: Lesson, given: Mapping[str, Any]) -> str:
    """A file name without its ending for a run: `04-data-parallel`, `04-data-parallel+world_size=3+seed=1`."""
    parts = [f"{name}={value}" for name, value in given.items()]
    return "+".join([lesson.name, *("".join(c if c.isalnum() or c in "=._-" else "_" for c in part) for part in parts)])


def run_lesson(
    lesson: Lesson, given: Mapping[str, Any], folder: Path, *, cell_timeout: float | None = None
) -> LessonRun:
    """Execute a lesson with the given parameters over its defaults; the executed notebook lands in `folder`.

    Parameters are checked first: a LessonError says which is unknown or ill-typed. After that nothing is raised: what
    goes wrong, a cell's error, a dead kernel, a cell over `cell_timeout` seconds, a process left behind, is in the
    run's `error`. The lesson runs in its own folder, as in JupyterLab.
    """
    given = check_values(lesson, given)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder.absolute() / f"{run_name(lesson, given)}.ipynb"
    run = LessonRun(lesson.name, given, all_values(lesson, given), str(target))
    target.unlink(missing_ok=True)
    started = time.perf_counter()
    with marked() as mark:
        try:
            error = _execute(lesson, given, target, cell_timeout)
        finally:
            left = end_leftovers(mark)
    run.seconds = round(time.perf_counter() - started, 2)
    if target.exists():
        run.results = results_of(nbformat.read(target, as_version=4))
    if left and not error:
        error = _("processes were left behind: {commands}").format(commands="; ".join(left))
    if error:
        run.status, run.error = "failed", error
    return run


def _execute(lesson: Lesson, given: Mapping[str, Any], target: Path, cell_timeout: float | None) -> str:
    """Run papermill; the error in one line, or the empty string."""
    import papermill  # takes a second to import
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    try:
        papermill.execute_notebook(
            str(lesson.path),
            str(target),
            parameters=dict(given),
            kernel_name="python3",
            language="python",
            cwd=str(lesson.path.parent),
            progress_bar=False,
            start_timeout=120,
            execution_timeout=cell_timeout,
            # the kernel is interrupted as part of its shutdown, and would report that as an error
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
            # on a machine with several users, others can listen on the loopback device
            config=Config({"KernelManager": {"transport_encryption": "auto"}}),
        )
    except papermill.PapermillExecutionError as error:
        failure = failure_of(nbformat.read(target, as_version=4)) if target.exists() else None
        cell, text = failure or ("", f"{error.ename}: {error.evalue}")
        return _("cell {cell}: {error}").format(cell=cell, error=text)
    except CellTimeoutError:
        message = _("a cell ran longer than {seconds:.0f} s without coming to its end")
        return message.format(seconds=cell_timeout or 0)
    except DeadKernelError:
        return _("the kernel died")
    except Exception as error:  # whatever papermill or the notebook's form brings: the other lessons go on
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""
