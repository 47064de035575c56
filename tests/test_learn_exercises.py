"""Every exercise of the workbook: its solution passes, each published wrong answer fails for the reason given."""

import nbformat
import pytest

from labkit.learn import check
from labkit.learn.checking import examine
from labkit.learn.exercises import DOTS, Exercise, WrongAnswer, every_exercise
from labkit.learn.lessons import NOTEBOOKS
from labkit.learn.solutions import solution_function, solution_source
from labkit.learn.stubs import learners_copy

EXERCISES = every_exercise()
WRONG = [(exercise, wrong) for exercise in EXERCISES for wrong in exercise.wrong_answers]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_PROGRESS", raising=False)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_the_solution_in_the_notebook_passes_strictly(exercise: Exercise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_STRICT", "1")
    check(exercise.id, solution_function(exercise))


@pytest.mark.parametrize(("exercise", "wrong"), WRONG, ids=[f"{one.id}: {wrong.name}" for one, wrong in WRONG])
def test_a_plausible_wrong_answer_is_rejected_for_its_reason(exercise: Exercise, wrong: WrongAnswer) -> None:
    report = examine(exercise, wrong.function)
    assert not report.passed
    first = report.failed[0]
    assert (first.name, wrong.cause in first.finding.cause) == (wrong.fails, True), str(report)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_the_learners_stub_is_not_tried_yet_and_holds_no_solution(exercise: Exercise) -> None:
    (path,) = NOTEBOOKS.glob(f"{exercise.lesson}-*.ipynb")
    copy = learners_copy(nbformat.read(path, as_version=4))
    (cell,) = [cell for cell in copy.cells if cell.get("id") == exercise.cell_id]
    assert cell.source != solution_source(exercise)
    names: dict[str, object] = {}
    exec(cell.source, names)
    assert examine(exercise, names[exercise.answer]).untouched  # type: ignore[arg-type]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_the_lesson_states_difficulty_and_minutes_and_offers_check_and_hints(exercise: Exercise) -> None:
    (path,) = NOTEBOOKS.glob(f"{exercise.lesson}-*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    (position,) = [number for number, cell in enumerate(cells) if cell.get("id") == exercise.cell_id]
    task = cells[position - 1].source
    stated = DOTS[exercise.dots - 1] in task and f"({exercise.minutes} minutes)" in task
    assert stated or f'exercise("{exercise.id}")' in task, "they stand before the stub, as the exercise has them"
    assert any(f'check("{exercise.id}", {exercise.answer})' in cell.source for cell in cells)
    assert any(f'hint("{exercise.id}")' in cell.source for cell in cells)
