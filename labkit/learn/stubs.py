"""Make the learner's copy of a lesson: solutions become stubs, and the profile is the one for a lesson in the lab."""

import copy
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # nbformat takes a second to import
    from nbformat import NotebookNode

BEGIN = "### BEGIN SOLUTION"
END = "### END SOLUTION"
STUB = 'raise NotImplementedError("not tried yet")  # your code here'
_PROFILE = re.compile(r"^(profile\s*(?::\s*str\s*)?=\s*)(['\"])quick\2", re.MULTILINE)


def stub_source(source: str) -> str:
    """The source with each solution, markers included, replaced by one line that says it was not tried yet.

    The stub is indented as the marker was. Raises ValueError where markers don't pair, and where a solution stands
    outside of a function: there the stub would stop the notebook.
    """
    kept: list[str] = []
    inside = False
    for line in source.split("\n"):
        marker = line.strip()
        if marker not in (BEGIN, END):
            if not inside:
                kept.append(line)
            continue
        if (marker == BEGIN) == inside:
            raise ValueError(f"a line {marker!r} has no counterpart")
        inside = not inside
        if inside:
            indent = line[: len(line) - len(line.lstrip())]
            if not indent:
                raise ValueError(f"{BEGIN!r} stands outside of a function, where its stub would stop the notebook")
            kept.append(indent + STUB)
    if inside:
        raise ValueError(f"a line {BEGIN!r} has no counterpart")
    return "\n".join(kept)


def learners_copy(notebook: "NotebookNode") -> "NotebookNode":
    """A copy with stubs for solutions and `profile = "lab"`. Raises ValueError, naming the cell, on bad markers."""
    made = copy.deepcopy(notebook)
    for cell in made.cells:
        if cell.cell_type != "code":
            continue
        try:
            cell.source = stub_source(cell.source)
        except ValueError as error:
            raise ValueError(f"cell {cell.get('id', '?')}: {error}") from error
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source = _PROFILE.sub(r"\1\2lab\2", cell.source)
    return made
