"""The learner's progress on disk: one JSON file that several notebooks change at once, and that never stops a lesson.

Each change reads the file under a lock, changes it, and puts the new one in place in a single step. Nothing leaves the
machine.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from labkit.learn.surroundings import live
from labkit.words import _

FORMAT = "labkit-progress-1"
NAME = "progress.json"
SECTIONS = ("lessons", "predictions", "exercises")
_LOCK_SECONDS = 5.0

Progress = dict[str, Any]

_in_memory: Progress = {}
_given_up: set[Path] = set()


def empty() -> Progress:
    """The progress of somebody who has not started."""
    return {"format": FORMAT, **{section: {} for section in SECTIONS}}


def progress_path() -> Path | None:
    """Where progress is kept: LABKIT_PROGRESS, else the learner's workspace, else the user's state folder.

    None means in memory only, which is so for every run that no learner sits at and that names no file.
    """
    named = os.environ.get("LABKIT_PROGRESS")
    if named:
        return Path(named).expanduser().absolute()
    return learners_path() if live() else None


def learners_path() -> Path:
    """The file of the learner who works in the current folder."""
    from labkit.learn.workspace import workspace_folder  # it brings nbformat with it

    workspace = workspace_folder()
    if os.environ.get("LABKIT_WORKSPACE") or Path.cwd().is_relative_to(workspace) or (workspace / NAME).is_file():
        return workspace / NAME
    return Path(platformdirs.user_state_dir("labkit", appauthor=False)) / NAME


def read_progress() -> Progress:
    """What is kept now. A file that can't be read is put aside and said so; the lesson goes on."""
    path = _usable_path()
    if path is None or not path.exists():
        return _in_memory or empty()
    try:
        with _lock(path):
            return _load(path)
    except (OSError, filelock.Timeout) as error:
        _go_on_in_memory(path, error)
        return _in_memory


def change_progress(change: Callable[[Progress], None]) -> None:
    """Apply `change` to the progress and keep the outcome, whatever other notebooks do meanwhile."""
    path = _usable_path()
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(path):
                progress = _load(path)
                change(progress)
                _replace(path, progress)
            return
        except (OSError, filelock.Timeout) as error:
            _go_on_in_memory(path, error)
    if not _in_memory:
        _in_memory.update(empty())
    change(_in_memory)


def load_progress(path: Path) -> Progress:
    """The progress in a file, for a look: a file that is not there is empty, any other is refused with ValueError."""
    if not path.exists():
        return empty()
    progress = json.loads(path.read_text(encoding="utf-8"))
    if not _sound(progress):
        raise ValueError(_("it is no file of progress"))
    return {**empty(), **progress}


def forget_memory() -> None:
    """Drop what is kept in memory only."""
    _in_memory.clear()
    _given_up.clear()


def _usable_path() -> Path | None:
    path = progress_path()
    return None if path in _given_up else path


def _lock(path: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(f"{path}.lock", timeout=_LOCK_SECONDS)


def _load(path: Path) -> Progress:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return empty()
    except UnicodeDecodeError:
        text = ""
    try:
        progress = json.loads(text)
    except ValueError:
        progress = None
    if not _sound(progress):
        _put_aside(path)
        return empty()
    return {**empty(), **progress}


def _sound(progress: Any) -> bool:
    if not isinstance(progress, dict) or not str(progress.get("format")).startswith("labkit-progress-"):
        return False
    parts = [progress.get(section, {}) for section in SECTIONS]
    return all(isinstance(part, dict) and all(isinstance(one, dict) for one in part.values()) for part in parts)


def _put_aside(path: Path) -> None:
    aside, number = path.with_name(path.name + ".broken"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.broken-{number}")
    path.replace(aside)
    text = _("The file of your progress could not be read; it is kept as {aside}, and a new one was begun.")
    print(text.format(aside=aside.name), file=sys.stderr)


def _replace(path: Path, progress: Progress) -> None:
    text = json.dumps(progress, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=path.name + ".", suffix=".part", delete=False
    ) as part:
        try:
            part.write(text)
            part.flush()
            os.fsync(part.fileno())
            part.close()
            os.replace(part.name, path)
        except BaseException:
            part.close()
            Path(part.name).unlink(missing_ok=True)
            raise


def _go_on_in_memory(path: Path, error: Exception) -> None:
    """Leave the file alone from now on, begin with what it held, and say so once."""
    _given_up.add(path)
    _in_memory.update(empty())
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        _in_memory.update(kept if _sound(kept) else {})
    except (OSError, ValueError):
        pass
    text = _("Your progress can't be kept in {path} ({reason}); until the kernel restarts it is in memory only.")
    reason = getattr(error, "strerror", None) or _("another program holds its lock")
    print(text.format(path=path, reason=reason), file=sys.stderr)
