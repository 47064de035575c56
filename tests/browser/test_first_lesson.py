"""The first lesson in JupyterLab, as a learner meets it: Run All in their copy, a prediction, an exercise."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from labkit.learn.lessons import all_lessons
from labkit.learn.workspace import update_workspace

from .labpage import LabPage

LESSONS = all_lessons()
DROPS_THE_TAIL = "return range(rank * (length // world_size), (rank + 1) * (length // world_size))"


@pytest.mark.skipif(not LESSONS, reason="there are no lessons yet")
def test_a_learner_runs_all_then_predicts_and_does_the_exercise_wrongly_and_rightly(
    serve: Callable[[Path], LabPage], tmp_path: Path
) -> None:
    update_workspace(tmp_path / "workspace")
    name = LESSONS[0].path.name
    copy = tmp_path / "workspace" / name
    copy.write_text(copy.read_text().replace('profile: str = \\"lab\\"', 'profile: str = \\"quick\\"'))
    lab = serve(tmp_path / "workspace")
    lab.open(name)
    lab.run_all()
    lab.wait_done(400)
    assert lab.errors() == []
    assert lab.pictures() >= 1

    # a prediction given after the measurement stands beside it
    box = lab.cell("predict-list").locator("input[type=text]")
    box.fill("3")
    box.press("Enter")
    expect(lab.cell("predict-list")).to_contain_text("3 items", timeout=30_000)
    expect(lab.cell("list-length")).to_contain_text("3 items", timeout=30_000)

    # the exercise: not tried, wrong, right
    expect(lab.cell("shares-check")).to_contain_text("not tried yet")
    lab.write_cell("shares", f"def share(length, rank, world_size):\n    {DROPS_THE_TAIL}")
    lab.run_cell("shares")
    lab.run_cell("shares-check", 60)
    expect(lab.cell("shares-check")).to_contain_text("drops the remainder", timeout=60_000)
    lab.write_cell("shares", "def share(length, rank, world_size):\n    return range(rank, length, world_size)")
    lab.run_cell("shares")
    lab.run_cell("shares-check", 60)
    expect(lab.cell("shares-check")).to_contain_text("all", timeout=60_000)
    expect(lab.cell("shares-check")).not_to_contain_text("failed", timeout=60_000)
    assert lab.errors() == []
