"""Something to play with, and its still twin for those who can't."""

import nbclient
import nbconvert
import nbformat
import pytest

from labkit.show import Picture, bars, explore, still_twin

NOTEBOOK = """
from labkit.show import bars, explore
def ring(ranks=4, algorithm="ring"):
    return bars({algorithm: 2 * (ranks - 1) / ranks}, unit="tensors", title=f"{ranks} ranks")
explore(ring, title="Try more ranks", ranks=(2, 16), algorithm=["ring", "tree"])
"""


def ring(ranks: int = 4, algorithm: str = "ring") -> Picture:
    if ranks == 13:
        raise ValueError("thirteen ranks bring bad luck")
    return bars({algorithm: ranks}, unit="ranks", title=f"{ranks} ranks")


@pytest.fixture
def shown(monkeypatch):
    """What explore displays, in a process without a kernel."""
    found = []
    monkeypatch.setattr(still_twin, "display", lambda thing, **_: found.append(thing))
    return found


def test_the_still_twin_starts_at_the_functions_own_defaults(shown):
    explore(ring, title="Try", ranks=(2, 16))
    (still,) = shown
    assert still.picture.title == "4 ranks"
    assert "Try" in still._repr_mimebundle_()["text/html"]


def test_without_a_default_a_control_starts_at_its_least_or_first(shown):
    explore(lambda size, kind: ring(size, kind), title="t", size=(3, 5), kind=["tree", "ring"])
    assert "tree: 3 ranks" in shown[0].picture.alt


def test_other_values_are_there_to_unfold(shown):
    explore(ring, title="t", ranks=(2, 16), algorithm=["ring", "tree"])
    html = shown[0]._repr_mimebundle_()["text/html"]
    folded = html[html.index("<details>") :]
    for values in ("ranks = 2", "ranks = 16", "algorithm = tree"):
        assert f"<strong>{values}</strong>" in folded
    assert html.count("<img ") == 4


def test_a_sentence_stands_where_the_function_refuses_the_values(shown):
    explore(ring, title="t", ranks=[13, 4])
    still = shown[0]
    assert still.picture.title == "4 ranks"
    explore(lambda n: ring(n), title="t", n=[13])
    assert "<p>thirteen ranks bring bad luck</p>" in shown[1]._repr_mimebundle_()["text/html"]


def test_a_control_that_moves_reports_all_values():
    seen = []
    controls = {"ranks": (2, 16), "share": (0.0, 1.0), "algorithm": ["ring", "tree"], "overlap": True}
    box = still_twin.panel(controls, {"ranks": 4, "share": 0.5, "algorithm": "ring", "overlap": True}, seen.append)
    slider, _, menu, tick = box.children
    slider.value = 8
    menu.value = "tree"
    tick.value = False
    assert seen[0] == {"ranks": 8, "share": 0.5, "algorithm": "ring", "overlap": True}
    assert seen[-1] == {"ranks": 8, "share": 0.5, "algorithm": "tree", "overlap": False}
    assert slider.continuous_update is False


@pytest.mark.parametrize("control", [(3, 1), (1,), [], "all", (1, 2, 3, 4)])
def test_what_is_no_control_is_refused_in_a_sentence(control):
    with pytest.raises(ValueError, match="the control 'ranks' is"):
        explore(ring, title="t", ranks=control)


def test_an_argument_that_the_function_lacks_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="a control 'size', but the function takes ranks, algorithm"):
        explore(ring, title="t", size=(1, 2))


def test_a_function_that_gives_no_picture_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match="needs a function that returns a Picture; it returned int"):
        explore(lambda n: n, title="t", n=(1, 2))


def test_a_notebook_run_without_a_reader_keeps_the_still_twin():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    still, controls = notebook.cells[0].outputs
    assert "4 ranks." in still["data"]["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in controls["data"]
    assert controls["data"]["text/plain"] == "(Controls, live in Jupyter: ranks, algorithm.)"
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert 'alt="4 ranks. ' in page and "<details>" in page
