"""The first lesson in JupyterLab, as a learner meets it: the learner's copy, Run All, every picture there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.learn.lessons import all_lessons
from labkit.learn.workspace import update_workspace

from .labpage import LabPage

LESSONS = all_lessons()


@pytest.mark.skipif(not LESSONS, reason="there are no lessons yet")
def test_run_all_in_the_learners_copy_shows_its_pictures_and_no_error(
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
