"""Hints come one at a time, solutions on request, and both are noted."""

from pathlib import Path

import nbformat
import pytest

from labkit.learn import hint, progress, progress_file, solution, solutions
from labkit.learn.exercises import find_exercise
from labkit.learn.solutions import NoSolution, solution_function, solution_source

CELL = '''import torch
def share(length, rank, world_size):
    """The indices of this rank."""
    ### BEGIN SOLUTION
    return range(math.floor(rank), length, world_size)
    ### END SOLUTION
print("not for the test")'''


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_PROGRESS", raising=False)
    progress_file.forget_memory()


def shipped(folder: Path, source: str = CELL, cell_id: str = "shares") -> Path:
    """A folder with a lesson 00 that holds this exercise cell."""
    cells = [
        nbformat.v4.new_code_cell("import math\nraise SystemExit", id="setup"),
        nbformat.v4.new_code_cell("%%ranks\nimport nothing", id="magic"),
        nbformat.v4.new_code_cell(source, id=cell_id),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "00-try.ipynb")
    return folder


def test_each_call_unfolds_one_more_hint_and_says_which_of_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    hints = find_exercise("shares").hints
    for number in range(1, len(hints) + 1):
        hint("shares")
        shown = capsys.readouterr().out
        assert f"Hint {number} of {len(hints)}" in shown
        assert hints[number - 1] in shown
        assert ("That was the last hint" in shown) == (number == len(hints))
        assert progress.exercise_entry("shares")["hints_seen"] == number
    hint("shares")
    assert f"Hint {len(hints)} of {len(hints)}" in capsys.readouterr().out


def test_an_unknown_exercise_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    hint("sharez")
    solution("sharez")
    assert capsys.readouterr().out.count("Did you mean “shares”?") == 2


def test_a_solution_is_shown_only_on_request_and_that_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(solutions, "NOTEBOOKS", shipped(tmp_path))
    solution("shares")
    shown = capsys.readouterr().out
    assert "on request" in shown and "range(" not in shown
    assert progress.exercise_entry("shares")["solution_seen"] is None
    solution("shares", show=True)
    assert "    return range(math.floor(rank), length, world_size)" in capsys.readouterr().out
    assert progress.exercise_entry("shares")["solution_seen"]


def test_the_solution_is_the_marked_cell_without_its_marks(tmp_path: Path) -> None:
    source = solution_source(find_exercise("shares"), shipped(tmp_path))
    assert source == "\n".join(line for line in CELL.splitlines() if "###" not in line)


def test_the_solution_runs_with_the_imports_before_it_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    share = solution_function(find_exercise("shares"), shipped(tmp_path))
    assert share(10, 1, 4) == range(1, 10, 4)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("source", "cell_id", "sentence"),
    [
        ("def share(length, rank, world_size): ...", "shares", "holds no marked solution"),
        (CELL, "other", "not beside the package"),
        (CELL.replace("def share", "def shore"), "shares", "has no share"),
    ],
)
def test_a_solution_that_is_not_there_is_one_sentence(tmp_path: Path, source: str, cell_id: str, sentence: str) -> None:
    with pytest.raises(NoSolution, match=sentence):
        solution_function(find_exercise("shares"), shipped(tmp_path, source, cell_id))


def test_without_the_shipped_notebooks_solution_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(solutions, "NOTEBOOKS", tmp_path)
    solution("shares")
    assert "not beside the package" in capsys.readouterr().out
