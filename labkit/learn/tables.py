"""The results of many runs as one table: CSV, a row a result, and JSON, with everything known of each run."""

import csv
import json
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.learn.running import LessonRun

COLUMNS = ("name", "value", "unit", "status", "seconds", "error")


def table_rows(runs: Sequence[LessonRun]) -> list[dict[str, Any]]:
    """One row a result, with the lesson and the parameters that were asked for; a run without results has one row."""
    names = list(dict.fromkeys(name for run in runs for name in run.given))
    rows = []
    for run in runs:
        about = {"lesson": run.lesson, **{name: run.given.get(name, "") for name in names}}
        how = {"status": run.status, "seconds": run.seconds, "error": run.error}
        for result in run.results or [{"name": "", "value": "", "unit": ""}]:
            rows.append(about | {name: result[name] for name in ("name", "value", "unit")} | how)
    return rows


def write_tables(runs: Sequence[LessonRun], folder: Path) -> tuple[Path, Path]:
    """Write `results.csv` and `results.json` into `folder`, each put in place in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = table_rows(runs)
    csv_path, json_path = folder / "results.csv", folder / "results.json"
    part = folder / "results.csv.part"
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["lesson", *COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    part.replace(csv_path)
    write_json({"labkit": version("labkit"), "runs": [run.as_dict() for run in runs]}, json_path)
    return csv_path, json_path


def write_json(content: Any, path: Path) -> None:
    """JSON that every reader takes: a float that JSON can't say is written as the text "nan", "inf" or "-inf"."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_plain(content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def _plain(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _plain(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
