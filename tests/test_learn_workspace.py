"""The learner's copies: stubs for solutions, and updates that never touch what the learner has changed."""

import itertools
import json
import shutil
from pathlib import Path

import nbformat
import pytest
from tiny_lessons import STUBBED, write_lesson

from labkit.learn.commands import workspace_command
from labkit.learn.lessons import LessonError
from labkit.learn.running import run_lesson
from labkit.learn.stubs import STUB, stub_source
from labkit.learn.workspace import RECORD, Delivery, update_workspace


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A folder of lessons: 00-tiny with an exercise, and a picture."""
    write_lesson(tmp_path / "shipped", [STUBBED])
    (tmp_path / "shipped" / "pictures").mkdir()
    (tmp_path / "shipped" / "pictures" / "ring.svg").write_text("<svg/>")
    return tmp_path / "shipped"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


def source(notebook: Path, cell_id: str = "cell-0") -> str:
    cells = nbformat.read(notebook, as_version=4).cells
    return str(next(cell.source for cell in cells if cell.id == cell_id))


def write_answer(notebook: Path, answer: str) -> None:
    """What a learner does: write into the stub, and save."""
    text = nbformat.read(notebook, as_version=4)
    text.cells[2].source = answer
    nbformat.write(text, notebook)


def whats(deliveries: list[Delivery]) -> list[str]:
    return [delivery.what for delivery in deliveries]


def everything(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*")) if path.is_file())


def test_a_solution_becomes_a_stub_at_its_own_depth() -> None:
    assert stub_source(STUBBED) == f"def double(x):\n    {STUB}\n"
    two = "class A:\n    def b(self):\n        ### BEGIN SOLUTION\n        return 1\n        ### END SOLUTION\n"
    assert stub_source(two + STUBBED).count(STUB) == 2
    assert stub_source("x = 1\n# no solution here") == "x = 1\n# no solution here"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def f():\n    ### BEGIN SOLUTION\n    return 1\n", "has no counterpart"),
        ("def f():\n    ### END SOLUTION\n", "has no counterpart"),
        ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n", "outside of a function"),
        ("def f():\n    ### BEGIN SOLUTION\n    ### BEGIN SOLUTION\n    ### END SOLUTION\n", "has no counterpart"),
    ],
)
def test_bad_markers_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        stub_source(text)


def test_the_copy_has_stubs_the_lab_profile_and_no_solution(shipped: Path, workspace: Path) -> None:
    assert whats(update_workspace(workspace, shipped)) == ["new", "new"]
    copy = workspace / "00-tiny.ipynb"
    assert source(copy) == f"def double(x):\n    {STUB}\n"
    assert source(copy, "parameters").startswith('profile: str = "lab"  # quick, lab or gpu\nworld_size: int = 2')
    assert "x + x" not in everything(workspace)
    assert (workspace / "pictures" / "ring.svg").read_text() == "<svg/>"


def test_the_copy_runs_to_its_end_with_stubs_untouched(shipped: Path, workspace: Path, tmp_path: Path) -> None:
    from labkit.learn.lessons import read_lesson

    update_workspace(workspace, shipped)
    assert run_lesson(read_lesson(workspace / "00-tiny.ipynb"), {}, tmp_path / "out").ok


def test_a_second_call_changes_nothing(shipped: Path, workspace: Path) -> None:
    update_workspace(workspace, shipped)
    before = everything(workspace)
    assert whats(update_workspace(workspace, shipped)) == ["same", "same"]
    assert everything(workspace) == before


def test_a_copy_that_the_learner_has_not_changed_follows_updates(shipped: Path, workspace: Path) -> None:
    update_workspace(workspace, shipped)
    write_lesson(shipped, [STUBBED + "# clearer now"])
    assert whats(update_workspace(workspace, shipped)) == ["updated", "same"]
    assert "clearer now" in source(workspace / "00-tiny.ipynb")


def test_a_copy_that_the_learner_has_changed_stays_and_the_new_lesson_arrives_beside_it(
    shipped: Path, workspace: Path
) -> None:
    update_workspace(workspace, shipped)
    mine = workspace / "00-tiny.ipynb"
    write_answer(mine, "def double(x): return 2 * x")
    bytes_of_mine = mine.read_bytes()
    assert whats(update_workspace(workspace, shipped)) == ["same", "same"]
    write_lesson(shipped, [STUBBED + "# clearer now"])
    beside = update_workspace(workspace, shipped)[0]
    assert beside.path == workspace / "00-tiny.new.ipynb" and "clearer now" in source(beside.path)
    assert beside.sentence() == (
        "00-tiny.ipynb has changed; yours stays as it is, and the new one is beside it: 00-tiny.new.ipynb."
    )
    assert mine.read_bytes() == bytes_of_mine
    assert whats(update_workspace(workspace, shipped)) == ["same", "same"]  # it is offered once


def test_work_in_the_new_lesson_is_not_lost_by_the_next_update(shipped: Path, workspace: Path) -> None:
    update_workspace(workspace, shipped)
    write_answer(workspace / "00-tiny.ipynb", "first answer = 1")
    for number in (1, 2, 3):
        write_lesson(shipped, [STUBBED + f"# version {number}"])
        update_workspace(workspace, shipped)
        if number == 2:  # until now `.new` was untouched, and followed
            assert "version 2" in source(workspace / "00-tiny.new.ipynb")
            write_answer(workspace / "00-tiny.new.ipynb", "second answer = 2")
    kept = {path.name: source(path) for path in workspace.glob("00-*.ipynb")}
    assert kept["00-tiny.ipynb"] == "first answer = 1"
    assert kept["00-tiny.new.ipynb"] == "second answer = 2"
    assert "version 3" in kept["00-tiny.new2.ipynb"] and len(kept) == 3


def test_a_copy_that_was_removed_comes_back(shipped: Path, workspace: Path) -> None:
    update_workspace(workspace, shipped)
    (workspace / "00-tiny.ipynb").unlink()
    assert whats(update_workspace(workspace, shipped)) == ["new", "same"]


def test_files_without_a_readable_record_count_as_the_learners(shipped: Path, workspace: Path) -> None:
    update_workspace(workspace, shipped)
    write_answer(workspace / "00-tiny.ipynb", "mine = 1")
    (workspace / RECORD).write_text("{")
    assert whats(update_workspace(workspace, shipped)) == ["beside", "same"]
    assert source(workspace / "00-tiny.ipynb") == "mine = 1"


def test_a_lesson_with_bad_markers_is_named(shipped: Path, workspace: Path) -> None:
    write_lesson(shipped, ["def f():\n    ### BEGIN SOLUTION\n    return 1"], name="01-bad")
    with pytest.raises(LessonError, match=r"01-bad\.ipynb can't be copied: cell cell-0: a line .* has no counterpart"):
        update_workspace(workspace, shipped)


class Killed(BaseException):
    """The process ends here; no `except Exception` stops it."""


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the update at its `step`-th action on the disk: amid a write, before a rename, or just after it."""
    write, replace, count = Path.write_bytes, Path.replace, itertools.count()

    def write_half(path: Path, content: bytes) -> int:
        if next(count) == step:
            write(path, content[: len(content) // 2])
            raise Killed
        return write(path, content)

    def rename_or_not(path: Path, target: Path) -> Path:
        if next(count) == step:
            raise Killed
        renamed = replace(path, target)
        if next(count) == step:
            raise Killed
        return renamed

    monkeypatch.setattr(Path, "write_bytes", write_half)
    monkeypatch.setattr(Path, "replace", rename_or_not)


def test_a_kill_at_any_moment_loses_nothing(shipped: Path, workspace: Path, tmp_path: Path) -> None:
    write_lesson(shipped, [STUBBED], name="01-mine")
    update_workspace(workspace, shipped)
    write_answer(workspace / "01-mine.ipynb", "mine = 1")
    for name in ("00-tiny", "01-mine"):
        write_lesson(shipped, [STUBBED + "# changed"], name=name)
    killed = True
    for step in itertools.count():
        here = tmp_path / f"killed-{step}"
        shutil.copytree(workspace, here)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(step, patch)
            try:
                update_workspace(here, shipped)
                killed = False
            except Killed:
                pass
        for path in here.glob("[!.]*.ipynb"):
            nbformat.read(path, as_version=4)  # each file is whole
        assert source(here / "01-mine.ipynb") == "mine = 1"
        update_workspace(here, shipped)
        assert {path.name: "# changed" in source(path) for path in here.glob("[!.]*.ipynb")} == {
            "00-tiny.ipynb": True,
            "01-mine.ipynb": False,
            "01-mine.new.ipynb": True,
        }
        if not killed:
            break
    assert step > 10


def test_the_command_tells_only_what_concerns_the_learners_files(
    shipped: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LABKIT_WORKSPACE", str(workspace))
    monkeypatch.setattr("labkit.learn.commands.update_workspace", lambda folder: update_workspace(folder, shipped))
    assert workspace_command([]) == 0
    assert capsys.readouterr().out == f"The lessons to work in are in {workspace}.\n"
    write_answer(workspace / "00-tiny.ipynb", "mine = 1")
    write_lesson(shipped, [STUBBED + "# changed"])
    assert workspace_command([]) == 0
    assert capsys.readouterr().out.startswith("labkit: 00-tiny.ipynb has changed; yours stays as it is")
    assert json.loads((workspace / RECORD).read_text())["format"] == 1
