"""A sweep runs every combination, goes on where it was, survives failures, and makes one table and one picture."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_lessons import RESULT, write_lesson

from labkit.learn.commands import sweep_command
from labkit.learn.lessons import Lesson, LessonError
from labkit.learn.parameters import read_axes
from labkit.learn.running import LessonRun, run_lesson
from labkit.learn.sweep_picture import draw_sweep
from labkit.learn.sweeping import combinations, sweep

FAILS_AT_4 = RESULT + "assert world_size != 4, 'four ranks are too many'\n"


@pytest.fixture
def executions(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The parameters of each run that a sweep really starts."""
    started: list[dict[str, Any]] = []

    def watched(lesson: Lesson, given: dict[str, Any], *others: Any, **named: Any) -> LessonRun:
        started.append(given)
        return run_lesson(lesson, given, *others, **named)

    monkeypatch.setattr("labkit.learn.sweeping.run_lesson", watched)
    return started


def test_axes_are_read_by_the_parameters_type(tmp_path: Path) -> None:
    lesson = write_lesson(tmp_path, parameters="n: int = 1\nrate: float = 0.1\nsizes: list = [1, 2]  # layers")
    assert read_axes(lesson, ["n=1,2,4,2", "rate=1,0.5", "sizes=[1],[2, 3]"]) == {
        "n": [1, 2, 4],
        "rate": [1.0, 0.5],
        "sizes": [[1], [2, 3]],
    }
    for wrong in ("n=1,x", "sizes=3", "rate=", "m=1"):
        with pytest.raises(LessonError):
            read_axes(lesson, [wrong])


def test_combinations_are_the_product_of_the_values() -> None:
    found = list(combinations({"a": [1, 2], "b": ["x", "y", "z"]}))
    assert len(found) == 6 and found[0] == {"a": 1, "b": "x"} and found[-1] == {"a": 2, "b": "z"}


def test_six_combinations_make_one_table_and_a_failure_stops_none_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson, out = write_lesson(tmp_path, [FAILS_AT_4]), tmp_path / "out"
    code = sweep_command([str(lesson.path), "-p", "world_size=1,2,4", "-p", "rate=0.5,1", "--out", str(out)])
    assert code == 1
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    squares = [(row["world_size"], row["rate"], row["value"]) for row in rows if row["name"] == "ranks-squared"]
    assert squares == [(str(n), rate, str(n * n)) for n in (1, 2, 4) for rate in ("0.5", "1.0")]
    for row in rows:
        wanted = "cell cell-0: AssertionError: four ranks are too many" if row["world_size"] == "4" else ""
        assert row["error"] == wanted
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 6
    assert len(list((out / "notebooks").glob("*.ipynb"))) == 6
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "4 passed, 2 failed"
    assert "6/6" in said.err


def test_a_sweep_goes_on_where_it_was(tmp_path: Path, executions: list[dict[str, Any]]) -> None:
    lesson, out = write_lesson(tmp_path, [FAILS_AT_4]), tmp_path / "out"
    first = sweep(lesson, {"world_size": [1, 4]}, out, bar=False)
    again = sweep(lesson, {"world_size": [1, 4, 2]}, out, bar=False)
    assert executions == [{"world_size": n} for n in (1, 4, 4, 2)]  # finished 1 is skipped, failed 4 is tried again
    assert again[0] == first[0]
    assert [run.ok for run in again] == [True, False, True]


def test_a_changed_lesson_is_run_again(tmp_path: Path, executions: list[dict[str, Any]]) -> None:
    for cells in ([RESULT], [RESULT, "1 + 1"]):
        sweep(write_lesson(tmp_path, cells), {"world_size": [1]}, tmp_path / "out", bar=False)
    assert len(executions) == 2


def test_bad_axes_are_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lesson, out = write_lesson(tmp_path), tmp_path / "out"
    assert sweep_command([str(lesson.path), "-p", "world_size=1,two", "--out", str(out)]) == 2
    assert "takes int, as in world_size=2; 'two' is none" in capsys.readouterr().err
    assert sweep_command([str(lesson.path), "--out", str(out)]) == 2
    assert "needs at least one parameter" in capsys.readouterr().err
    assert not out.exists()


def runs_over(axes: dict[str, list[Any]]) -> list[LessonRun]:
    made = []
    for given in combinations(axes):
        results = [{"name": "time", "value": 1.5, "unit": "s", "cell": "a"}]
        results.append({"name": "claim/x", "value": "holds", "unit": "", "cell": "a"})
        made.append(LessonRun("00-tiny", given, given, "a.ipynb", results=results))
    return made


@pytest.mark.parametrize(
    ("axes", "drawn"),
    [
        ({"n": [1, 2, 4]}, True),
        ({"n": [1, 2], "profile": ["quick", "lab"]}, True),
        ({"n": [1, 2], "m": [1]}, True),
        ({"n": [1]}, False),
        ({"n": [1, 2], "m": [1, 2], "k": [1, 2]}, False),
    ],
)
def test_a_picture_is_drawn_when_one_or_two_parameters_vary(
    tmp_path: Path, axes: dict[str, list[Any]], drawn: bool
) -> None:
    alt = draw_sweep(runs_over(axes), axes, tmp_path / "sweep.png")
    assert (alt is not None) == drawn == (tmp_path / "sweep.png").exists()
    if alt:
        assert "00-tiny" in alt and "Panels: time." in alt
