"""Read what an executed notebook left in its outputs: results, pictures, and the cell that failed."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbformat import NotebookNode

from labkit.learn.results import MIME as RESULT_MIME


@dataclass(frozen=True)
class Picture:
    """One picture from an output: the file's bytes, its ending without the dot, and the text for who can't see it."""

    data: bytes
    ending: str
    alt: str


def _outputs(notebook: NotebookNode) -> Iterator[tuple[NotebookNode, NotebookNode]]:
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield cell, output


def results_of(notebook: NotebookNode) -> list[dict[str, Any]]:
    """Every result that the lesson emitted, in order: name, value, unit, and the cell's id."""
    found = []
    for cell, output in _outputs(notebook):
        content = output.get("data", {}).get(RESULT_MIME)
        if isinstance(content, dict) and {"name", "value", "unit"} <= content.keys():
            found.append({name: content[name] for name in ("name", "value", "unit")} | {"cell": cell.get("id", "")})
    return found


def pictures_of(notebook: NotebookNode) -> list[Picture]:
    """Every picture in the outputs, in order, each as PNG where there is one, else as SVG."""
    found = []
    for _cell, output in _outputs(notebook):
        data, metadata = output.get("data", {}), output.get("metadata", {})
        if "image/png" in data:
            png = base64.b64decode(data["image/png"])
            found.append(Picture(png, "png", metadata.get("image/png", {}).get("alt", metadata.get("alt", ""))))
        elif "image/svg+xml" in data:
            svg = "".join(data["image/svg+xml"]).encode()
            found.append(Picture(svg, "svg", metadata.get("image/svg+xml", {}).get("alt", metadata.get("alt", ""))))
    return found


def failure_of(notebook: NotebookNode) -> tuple[str, str] | None:
    """The id of the cell that failed, with `error: message` in one line, or None."""
    for cell, output in _outputs(notebook):
        if output.output_type == "error":
            message = " ".join(str(output.evalue).split())
            return cell.get("id", ""), f"{output.ename}: {message}" if message else output.ename
    return None
