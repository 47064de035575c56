"""Progress: kept by several notebooks at once, never in the way of a lesson, readable by the learner."""

import json
import multiprocessing
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import filelock
import platformdirs
import pytest

from labkit.learn import finish_lesson, progress, progress_command, progress_file, start_lesson


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of progress of each test."""
    path = tmp_path / "home" / "progress.json"
    monkeypatch.setenv("LABKIT_PROGRESS", str(path))
    progress_file.forget_memory()
    progress.set_lesson(None)
    return path


def _note(path: str, number: int) -> None:
    os.environ["LABKIT_PROGRESS"] = path
    for attempt in range(10):
        progress.note_attempt("ring", "03", passed=False)
        progress.note_prediction(f"key-{number}-{attempt}", 1.0, "bytes", after_measurement=False)


def test_notebooks_that_write_at_once_lose_nothing(kept: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_note, args=(str(kept), number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = json.loads(kept.read_text())
    assert found["exercises"]["ring"]["attempts"] == 30
    assert len(found["predictions"]) == 30
    assert [path.name for path in kept.parent.glob("*.part")] == []


def test_a_write_that_is_cut_short_leaves_the_old_file(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress.note_hints("ring", "03", 1)
    before = kept.read_text()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    progress.note_hints("ring", "03", 2)
    assert kept.read_text() == before
    assert [path.name for path in kept.parent.glob("*.part")] == []


@pytest.mark.parametrize("content", ["", "{not json", "[]", '{"format": "other"}', '{"lessons": {"00": 3}}', "\udcff"])
def test_a_corrupted_file_is_put_aside_and_said(kept: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    kept.parent.mkdir()
    raw = content.encode("utf-8", "surrogateescape")
    kept.write_bytes(raw)
    assert progress.kept_prediction("ring-bytes") is None
    progress.note_prediction("ring-bytes", 1.5, "bytes", after_measurement=False)
    assert kept.with_name("progress.json.broken").read_bytes() == raw
    assert progress.kept_prediction("ring-bytes") == json.loads(kept.read_text())["predictions"]["ring-bytes"]
    assert "it is kept as progress.json.broken" in capsys.readouterr().err


def test_a_second_broken_file_does_not_overwrite_the_first(kept: Path) -> None:
    kept.parent.mkdir()
    for content in ("one", "two"):
        kept.write_text(content)
        progress.note_hints("ring", "03", 1)
    assert kept.with_name("progress.json.broken").read_text() == "one"
    assert kept.with_name("progress.json.broken-2").read_text() == "two"


def test_what_a_later_version_wrote_into_it_survives(kept: Path) -> None:
    progress.note_attempt("ring", "03", passed=False)
    found = json.loads(kept.read_text())
    found["exercises"]["ring"]["mood"] = found["badges"] = "good"
    kept.write_text(json.dumps(found))
    progress.note_attempt("ring", "03", passed=True)
    after = json.loads(kept.read_text())
    assert (after["badges"], after["exercises"]["ring"]["mood"], after["exercises"]["ring"]["attempts"]) == (
        "good",
        "good",
        2,
    )


def test_where_nothing_can_be_written_the_lesson_goes_on_in_memory(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress.note_hints("ring", "03", 1)
    blocked = kept.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("LABKIT_PROGRESS", str(blocked / "progress.json"))
    progress.note_hints("tree", "03", 2)
    progress.note_hints("tree", "03", 3)
    assert progress.exercise_entry("tree")["hints_seen"] == 3
    assert capsys.readouterr().err.count("can't be kept") == 1


def test_a_lock_that_another_program_holds_is_not_waited_for_long(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress.note_hints("tree", "03", 1)
    monkeypatch.setattr(progress_file, "_LOCK_SECONDS", 0.05)
    with filelock.FileLock(f"{kept}.lock"):
        progress.note_hints("ring", "03", 2)
    assert "holds its lock" in capsys.readouterr().err
    assert progress.exercise_entry("ring")["hints_seen"] == 2
    assert progress.exercise_entry("tree")["hints_seen"] == 1, "memory begins with what was kept"


def test_a_run_without_a_learner_keeps_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_PROGRESS")
    monkeypatch.chdir(tmp_path)
    assert progress_file.progress_path() is None
    progress.note_hints("ring", "03", 1)
    assert progress.exercise_entry("ring")["hints_seen"] == 1
    assert list(tmp_path.rglob("*")) == []


def test_the_learners_file_is_in_the_workspace_else_with_the_users_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_WORKSPACE", str(tmp_path / "workspace"))
    assert progress_file.learners_path() == tmp_path / "workspace" / "progress.json"
    monkeypatch.delenv("LABKIT_WORKSPACE")
    monkeypatch.setattr("labkit.learn.workspace.workspace_folder", lambda: tmp_path / "workspace")
    monkeypatch.setattr(platformdirs, "user_state_dir", lambda *_, **__: str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert progress_file.learners_path() == tmp_path / "state" / "progress.json"
    (tmp_path / "workspace" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "workspace" / "deep")
    assert progress_file.learners_path() == tmp_path / "workspace" / "progress.json"


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX")
def test_nobody_else_can_read_it(kept: Path) -> None:
    progress.note_hints("ring", "03", 1)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_time_at_work_leaves_long_pauses_out(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [datetime(2026, 1, 1, tzinfo=UTC)]
    monkeypatch.setattr(progress, "now", lambda: clock[0].isoformat(timespec="seconds"))
    start_lesson("00")
    for minutes in (5, 60, 10):
        clock[0] += timedelta(minutes=minutes)
        progress.note_hints("shares", "00", 1)
    finish_lesson()
    entry = json.loads(kept.read_text())["lessons"]["00"]
    assert entry["active_seconds"] == 15 * 60
    assert (entry["opened"], entry["finished"]) == ("2026-01-01T00:00:00+00:00", "2026-01-01T01:15:00+00:00")


def test_the_lesson_is_read_from_the_notebooks_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "workspace/04-data-parallel.ipynb")
    assert progress.current_lesson() == "04"


def test_a_lesson_is_named_by_its_number() -> None:
    with pytest.raises(ValueError, match="named by its number"):
        start_lesson("start here")
    with pytest.raises(ValueError, match="no lesson was started"):
        finish_lesson()


def test_passing_once_counts_for_good(kept: Path) -> None:
    progress.note_attempt("ring", "03", passed=True)
    first = progress.exercise_entry("ring")["passed"]
    progress.note_attempt("ring", "03", passed=False)
    assert first and progress.exercise_entry("ring")["passed"] == first


def test_the_command_shows_what_was_done(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert progress_command([]) == 0
    assert "Nothing yet" in capsys.readouterr().out
    start_lesson("00")
    progress.note_prediction("ring-bytes", 3.0, "x tensor", after_measurement=False)
    progress.note_measurement("ring-bytes", 1.5, 2.0)
    progress.note_attempt("shares", "00", passed=False)
    progress.note_attempt("shares", "00", passed=True)
    progress.note_hints("shares", "00", 2)
    progress.note_solution("shares", "00")
    assert progress_command([]) == 0
    shown = capsys.readouterr().out
    assert "predicted ring-bytes: 3 x tensor, measured 1.5 x tensor" in shown
    assert "exercise A fair share: solved, 2 attempts, 2 hints, solution seen" in shown
    assert "factor of 2.00 in the median" in shown
    assert progress_command(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"]["ring-bytes"]["factor"] == 2.0


def test_the_command_refuses_a_file_that_is_none_of_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert progress_command(["--file", str(tmp_path / "x.json")]) == 1
    assert "can't be read" in capsys.readouterr().out
