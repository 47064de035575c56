"""Small lessons, made on the spot, for tests of what runs lessons."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.learn.lessons import Lesson, read_lesson

PARAMETERS = """profile: str = "quick"  # quick, lab or gpu
world_size: int = 2  # ranks
rate: float = 0.5  # learning rate
fast: bool = False  # whether to hurry
"""
RESULT = """from labkit.learn import result
result("ranks-squared", world_size**2, "ranks²")
result("scaled-rate", rate * world_size, "1/step")
"""
STUBBED = """def double(x):
    ### BEGIN SOLUTION
    y = x + x
    return y
    ### END SOLUTION
"""


def write_lesson(
    folder: Path, cells: Sequence[str] = (RESULT,), *, name: str = "00-tiny", parameters: str = PARAMETERS, **about: Any
) -> Lesson:
    """A lesson with the parameters cell and the given code cells (ids `cell-0`, ...); `about` goes to its metadata."""
    told = {"lesson": name[:2], "title": "A tiny lesson", "minutes": {"quick": 0.1, "lab": 5}, **about}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(metadata={"kernelspec": kernel, "labkit": told})
    notebook.cells = [
        new_markdown_cell("# A tiny lesson", id="title"),
        new_code_cell(parameters, id="parameters", metadata={"tags": ["parameters"]}),
        *(new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(cells)),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return read_lesson(path)
