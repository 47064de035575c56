"""Solutions, read from the one place where they stand: the marked cell of the lesson's notebook.

A learner's copy of a notebook holds stubs; the notebook that was shipped is still beside the package.
"""

import ast
import json
from pathlib import Path
from types import FunctionType
from typing import Any

from labkit.learn.exercises import Exercise, UnknownExercise, find_exercise
from labkit.learn.lessons import NOTEBOOKS
from labkit.learn.progress import note_solution
from labkit.learn.stubs import BEGIN, END
from labkit.learn.surroundings import Place, live, show, show_text
from labkit.words import _


class NoSolution(LookupError):
    """The solution can't be read; the message says why."""


def solution(exercise_id: str, *, show: bool = False) -> None:
    """Show a solution of the exercise, and note that it was seen, as `solution("ring")`.

    In JupyterLab a button stands between the call and the solution, so that Run All spoils nothing. Elsewhere it is
    shown only on request, with `show=True`.
    """
    try:
        exercise = find_exercise(exercise_id)
        source = solution_source(exercise)
    except (UnknownExercise, NoSolution) as error:
        show_text(str(error))
        return
    if show:
        _unfold(exercise, source, None)
    elif live():
        _offer(exercise, source)
    else:
        text = _('The solution is shown on request: `solution("{id}", show=True)`.')
        show_text(text.format(id=exercise.id))


def _offer(exercise: Exercise, source: str) -> None:
    import ipywidgets
    from IPython.display import display

    place = Place({"text/markdown": "", "text/plain": ""})
    button = ipywidgets.Button(description=_("Show a solution"), tooltip=_("It is noted in your progress."))
    button.layout.width = "auto"

    def unfold(_button: Any) -> None:
        spot.update({"text/plain": ""}, raw=True)
        _unfold(exercise, source, place)

    button.on_click(unfold)
    spot: Any = display(button, display_id=True)


def _unfold(exercise: Exercise, source: str, place: Place | None) -> None:
    note_solution(exercise.id, exercise.lesson)
    text = _("One solution of “{title}”; there are others.").format(title=_(exercise.title))
    bundle = {"text/markdown": f"{text}\n```python\n{source}\n```", "text/plain": f"{text}\n{source}"}
    if place is None:
        show(bundle)
    else:
        place.update(bundle)


def solution_source(exercise: Exercise, folder: Path | None = None) -> str:
    """The source of the marked cell, without the marks."""
    _path, cells, position = _find(exercise, folder)
    lines = cells[position].splitlines()
    return "\n".join(line for line in lines if line.strip() not in (BEGIN, END)).strip()


def solution_function(exercise: Exercise, folder: Path | None = None) -> FunctionType:
    """The solution, ready to call: the marked cell is executed after the imports of the cells before it."""
    path, cells, position = _find(exercise, folder)
    statements: list[ast.stmt] = []
    for cell in cells[:position]:
        statements += [node for node in _statements(cell) if isinstance(node, (ast.Import, ast.ImportFrom))]
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    statements += [node for node in _statements(cells[position]) if isinstance(node, kinds)]
    names: dict[str, Any] = {"__name__": "labkit_solution"}
    exec(compile(ast.Module(statements, []), f"<solution {exercise.id}>", "exec"), names)
    if exercise.answer not in names:
        raise NoSolution(f"exercise {exercise.id!r}: cell {exercise.cell_id!r} of {path.name} has no {exercise.answer}")
    return names[exercise.answer]  # type: ignore[no-any-return]


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []  # a cell with magics


def _find(exercise: Exercise, folder: Path | None) -> tuple[Path, list[str], int]:
    """The notebook, its code cells' sources, and which of them is the exercise's."""
    folder = folder or NOTEBOOKS
    for path in sorted(folder.glob(f"{exercise.lesson}*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
        for position, cell in enumerate(cells):
            if cell.get("id") == exercise.cell_id:
                if BEGIN not in sources[position] or END not in sources[position]:
                    text = _("The cell {cell} of {notebook} holds no marked solution.")
                    raise NoSolution(text.format(cell=exercise.cell_id, notebook=path.name))
                return path, sources, position
    text = _("The solution of “{id}” stands in the notebooks that were shipped, and they are not beside the package.")
    raise NoSolution(text.format(id=exercise.id))
