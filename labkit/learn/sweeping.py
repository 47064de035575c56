"""Run one lesson over the product of parameter values: resumable, one table, one picture, the executed notebooks."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from labkit.learn.lessons import Lesson
from labkit.learn.running import LessonRun, run_lesson, run_name
from labkit.learn.tables import write_json, write_tables


def combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of the values, the last axis changing fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def sweep(
    lesson: Lesson,
    axes: Mapping[str, Sequence[Any]],
    folder: Path,
    *,
    fixed: Mapping[str, Any] | None = None,
    again: bool = False,
    cell_timeout: float | None = None,
    bar: bool = True,
) -> list[LessonRun]:
    """Run the lesson for every combination of `axes`, with `fixed` parameters beside them.

    A combination that has finished in `folder` with the same lesson and parameters is not run again, unless `again`;
    one that failed is. A failure is recorded and the others go on. `results.csv` and `results.json` are written after
    every combination, so that an interrupted sweep has its table too.
    """
    runs: list[LessonRun] = []
    source = hashlib.sha256(lesson.path.read_bytes()).hexdigest()
    todo = tqdm(list(combinations(axes)), disable=not bar, unit="run", desc=lesson.name)
    for values in todo:
        todo.set_postfix_str(", ".join(f"{name}={value}" for name, value in values.items()))
        given = {**(fixed or {}), **values}
        record = folder / "runs" / f"{run_name(lesson, given)}.json"
        run = None if again else _finished(record, source, given)
        if run is None:
            run = run_lesson(lesson, given, folder / "notebooks", cell_timeout=cell_timeout)
            record.parent.mkdir(parents=True, exist_ok=True)
            write_json({"source": source, "run": run.as_dict()}, record)
            if not run.ok:
                tqdm.write(f"{run_name(lesson, given)}: {run.error}")
        runs.append(run)
        write_tables(runs, folder)
    return runs


def _finished(record: Path, source: str, given: Mapping[str, Any]) -> LessonRun | None:
    """The run kept in `record`, if it went well and is of this lesson and these parameters."""
    try:
        kept = json.loads(record.read_text(encoding="utf-8"))
        run = LessonRun(**kept["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = kept.get("source") == source and run.given == dict(given)
    return run if same and run.ok and Path(run.notebook).exists() else None
