"""Where the code runs: live before a learner, in a notebook that nobody watches, or outside of any notebook.

Live means that a front end with a person at it sent the cell: JupyterLab puts JPY_SESSION_NAME into its kernels and the
cell's id into each request, papermill, nbclient and nbval do neither. `LABKIT_LIVE=0` or `1` overrides.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any


def shell() -> Any:
    """The IPython shell that runs this code, or None. IPython is not imported for the question."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def in_notebook() -> bool:
    """Whether a kernel runs this code, so that rich output arrives somewhere."""
    return getattr(shell(), "kernel", None) is not None


def live() -> bool:
    """Whether a learner sits before this kernel and can answer a widget."""
    override = os.environ.get("LABKIT_LIVE")
    if override in ("0", "1"):
        return override == "1" and in_notebook()
    if not os.environ.get("JPY_SESSION_NAME") or not in_notebook():
        return False
    # a batch run started from a live notebook inherits the variable, but its requests carry no cell id
    request = shell().kernel.get_parent() or {}
    if request.get("header", {}).get("msg_type") == "execute_request":
        return "cellId" in request.get("metadata", {})
    return True


class Place:
    """A spot in the output of a cell, whose content may be replaced later; outside of a notebook it prints."""

    def __init__(self, bundle: Mapping[str, Any]) -> None:
        self._handle: Any = None
        if shell() is None:
            print(bundle["text/plain"])
            return
        from IPython.display import display

        self._handle = display(dict(bundle), raw=True, display_id=True)

    def update(self, bundle: Mapping[str, Any]) -> None:
        """Replace what stands there; where output can't be replaced it is printed below."""
        if self._handle is None or not in_notebook():
            print(bundle["text/plain"])
        else:
            self._handle.update(dict(bundle), raw=True)


def show(bundle: Mapping[str, Any]) -> None:
    """Put one output, given as content by MIME type, into the notebook; elsewhere print its text/plain."""
    if shell() is None:
        print(bundle["text/plain"])
        return
    from IPython.display import publish_display_data

    publish_display_data(dict(bundle))


def show_text(text: str) -> None:
    """Put Markdown prose into the notebook; elsewhere print it."""
    show({"text/markdown": text, "text/plain": text})
