"""Every lesson keeps the rules of the house, and runs: with papermill, under nbval, and as the learner's copy."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from labkit.learn.leftovers import end_leftovers, marked
from labkit.learn.lessons import Lesson, all_lessons, read_lesson
from labkit.learn.running import run_lesson
from labkit.learn.stubs import learners_copy
from labkit.learn.workspace import update_workspace

LESSONS = all_lessons()
SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
RANDOM_ID = re.compile(r"[0-9a-f]{8}|[0-9a-f-]{32,}")
LONGEST_CELL = 30
CELL_TIMEOUT = 300

pytestmark = pytest.mark.skipif(not LESSONS, reason="there are no lessons yet")
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)


def cells_of(lesson: Lesson, kind: str | None = None) -> list[NotebookNode]:
    notebook = nbformat.read(lesson.path, as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if kind in (None, cell.cell_type)]


def tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", ()))


@each_lesson
def test_it_says_what_it_is_and_what_it_takes(lesson: Lesson) -> None:
    metadata = nbformat.read(lesson.path, as_version=4).metadata
    assert metadata.kernelspec.name == "python3" and metadata.kernelspec.language == "python"
    assert metadata.labkit["lesson"] == lesson.path.name[:2] and metadata.labkit["title"]
    assert 0 < lesson.minutes["quick"] <= 0.75 and 0 < lesson.minutes["lab"] <= 60
    numbers = [other.number for other in LESSONS]
    assert all(number in numbers and number < lesson.number for number in lesson.needs)
    assert not {"widgets", "papermill"} & metadata.keys(), "metadata of a run were saved: strip them with nbstripout"


@each_lesson
def test_the_readme_lists_it_with_its_minutes_and_what_it_builds_on(lesson: Lesson, root: Path) -> None:
    link = f"[{lesson.title}](notebooks/{lesson.path.name})"
    row = f"| {lesson.number} | {link} | {lesson.minutes['lab']:g} | {', '.join(lesson.needs)} |".replace("|  |", "| |")
    assert row in (root / "README.md").read_text().splitlines()


@each_lesson
def test_its_parameters_are_one_cell_of_annotated_values_with_their_meaning(lesson: Lesson) -> None:
    (cell,) = [cell for cell in cells_of(lesson) if "parameters" in tags(cell)]
    assert len(lesson.parameters) == len(cell.source.strip().splitlines())
    for parameter in lesson.parameters:
        assert parameter.type != "None" and parameter.help, f"{parameter.name} lacks its type or its comment"
    assert (lesson.parameters[0].name, lesson.parameters[0].default) == ("profile", "quick")


@each_lesson
def test_its_cell_ids_are_names(lesson: Lesson) -> None:
    ids = [cell.id for cell in cells_of(lesson)]
    assert len(set(ids)) == len(ids)
    assert [name for name in ids if not SLUG.fullmatch(name) or RANDOM_ID.fullmatch(name)] == []


@each_lesson
def test_it_is_committed_without_outputs_but_for_golden_cells(lesson: Lesson) -> None:
    for cell in cells_of(lesson, "code"):
        kept = "keep_output" in tags(cell)
        assert kept or (not cell.outputs and cell.execution_count is None), f"cell {cell.id}: strip it with nbstripout"
        assert "raises-exception" not in tags(cell), f"cell {cell.id}: show an expected failure by a context manager"


@each_lesson
def test_it_explains_before_it_computes(lesson: Lesson) -> None:
    cells = cells_of(lesson)
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    kinds = [cell.cell_type for cell in cells]
    assert 2 * kinds.count("markdown") >= kinds.count("code")
    run = 0
    for cell in cells:
        wordless = cell.cell_type == "code" and "say(" not in cell.source
        run = run + 1 if wordless else 0
        assert run <= 3, f"cell {cell.id} is the fourth code cell in a row without a word"
        lines = cell.source.strip().splitlines()
        assert cell.cell_type != "code" or len(lines) <= LONGEST_CELL, f"cell {cell.id} has {len(lines)} lines"


@each_lesson
def test_its_solutions_can_be_taken_out(lesson: Lesson) -> None:
    copy = learners_copy(nbformat.read(lesson.path, as_version=4))
    assert "SOLUTION" not in "".join(cell.source for cell in copy.cells)


@each_lesson
def test_it_runs_with_papermill_and_its_solutions_pass_their_checks(
    lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_STRICT", "1")
    run = run_lesson(lesson, {}, tmp_path, cell_timeout=CELL_TIMEOUT)
    assert run.ok, run.error
    assert run.results, "a lesson emits results"


@each_lesson
def test_it_runs_under_nbval(lesson: Lesson) -> None:
    options = ["--nbval-lax", "--nbval-current-env", f"--nbval-cell-timeout={CELL_TIMEOUT}", "-p", "no:cacheprovider"]
    with marked() as mark:
        command = [sys.executable, "-m", "pytest", "-q", *options, lesson.path.name]
        done = subprocess.run(command, cwd=lesson.path.parent, capture_output=True, text=True)
        left = end_leftovers(mark)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert left == []


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner") / "workspace"
    update_workspace(folder)
    return folder


@each_lesson
def test_the_learners_copy_runs_to_its_end_with_stubs_untouched(
    lesson: Lesson, workspace: Path, tmp_path: Path
) -> None:
    copy = read_lesson(workspace / lesson.path.name)
    assert next(one for one in copy.parameters if one.name == "profile").default == "lab"
    run = run_lesson(copy, {"profile": "quick"}, tmp_path, cell_timeout=CELL_TIMEOUT)
    assert run.ok, run.error
