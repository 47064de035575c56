"""The learner's workspace: copies of the lessons to work in, which later updates never overwrite.

`workspace/.shipped.json` records of every file what was delivered (`content`, a hash of its bytes) and from which
version of the lesson (`source`). A file that still is what was delivered is the workbook's and follows its updates; any
other is the learner's, and an update arrives beside it. Files are put in place by a rename, and one that is replaced is
kept in `workspace/.before/`, so that a kill at any moment loses nothing.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labkit.learn.lessons import LESSON_FILE, NOTEBOOKS, ROOT, LessonError
from labkit.learn.stubs import learners_copy
from labkit.words import _

RECORD = ".shipped.json"
BEFORE = ".before"


@dataclass(frozen=True)
class Delivery:
    """What happened to one file: "new", "updated", "beside" (as `path`, next to the learner's own), or "same"."""

    what: str
    path: Path
    beside: Path | None = None

    def sentence(self) -> str:
        if self.what == "beside" and self.beside is not None:
            message = _("{name} has changed; yours stays as it is, and the new one is beside it: {new}.")
            return message.format(name=self.beside.name, new=self.path.name)
        texts = {"new": _("{name} is new."), "updated": _("{name} is up to date."), "same": _("{name} is unchanged.")}
        return texts[self.what].format(name=self.path.name)


def workspace_folder() -> Path:
    """Where the learner works: LABKIT_WORKSPACE, else `workspace/` beside `notebooks/`."""
    named = os.environ.get("LABKIT_WORKSPACE")
    return Path(named).expanduser().absolute() if named else ROOT / "workspace"


def shipped_files(notebooks: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file for the learner, as its path within the workspace with its content: lessons with stubs, and what
    they show (pictures), as it is."""
    import nbformat  # takes a second to import

    for path in sorted(notebooks.rglob("*")):
        inside = path.relative_to(notebooks)
        if path.is_dir() or any(part.startswith((".", "__")) for part in inside.parts):
            continue
        if LESSON_FILE.fullmatch(inside.as_posix()):
            try:
                made = learners_copy(nbformat.read(path, as_version=4))
            except Exception as error:  # nbformat raises many kinds
                raise LessonError(_("{path} can't be copied: {error}.").format(path=path, error=error)) from error
            yield inside, (nbformat.writes(made).rstrip("\n") + "\n").encode()
        else:
            yield inside, path.read_bytes()


def update_workspace(folder: Path, notebooks: Path = NOTEBOOKS) -> list[Delivery]:
    """Bring the learner's workspace up to date; what the learner has changed stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    record = _read_record(folder)
    deliveries = []
    for inside, content in shipped_files(notebooks):
        deliveries.append(_deliver(folder, inside, content, record))
        _write_record(folder, record)
    return deliveries


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_ours(path: Path, known: dict[str, str]) -> bool:
    return path.exists() and _hash(path.read_bytes()) == known.get("content")


def _deliver(folder: Path, inside: Path, content: bytes, record: dict[str, dict[str, str]]) -> Delivery:
    """Put one file where it belongs, and note it in the record."""
    target, source = folder / inside, _hash(content)
    known = record.get(inside.as_posix(), {})
    entry = {"source": source, "content": source}
    if not target.exists():
        _put(target, content)
        record[inside.as_posix()] = entry
        return Delivery("new", target)
    if target.read_bytes() == content:
        record[inside.as_posix()] = entry
        return Delivery("same", target)
    if _is_ours(target, known):
        _keep(folder, target)
        _put(target, content)
        record[inside.as_posix()] = entry
        return Delivery("updated", target)
    if known.get("source") == source:
        return Delivery("same", target)
    beside = _beside(folder, inside, content, record)
    if not beside.exists() or beside.read_bytes() != content:
        if beside.exists():
            _keep(folder, beside)
        _put(beside, content)
    record[beside.relative_to(folder).as_posix()] = entry
    record[inside.as_posix()] = {**known, "source": source}
    return Delivery("beside", beside, target)


def _beside(folder: Path, inside: Path, content: bytes, record: dict[str, dict[str, str]]) -> Path:
    """`NN-slug.new.ipynb`, or `.new2` and so on where the learner has begun to work in that one too."""
    number = 1
    while True:
        ending = ".new" if number == 1 else f".new{number}"
        path = folder / inside.with_name(f"{inside.stem}{ending}{inside.suffix}")
        known = record.get(path.relative_to(folder).as_posix(), {})
        if not path.exists() or path.read_bytes() == content or _is_ours(path, known):
            return path
        number += 1


def _put(target: Path, content: bytes) -> None:
    """Write beside, then rename: the file is never half there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(target)


def _keep(folder: Path, path: Path) -> None:
    """Move a file that is about to be replaced out of the way, whatever it holds at this moment."""
    kept = folder / BEFORE / f"{_hash(path.read_bytes())[:8]}-{path.name}"
    kept.parent.mkdir(exist_ok=True)
    path.replace(kept)


def _read_record(folder: Path) -> dict[str, dict[str, str]]:
    """What was delivered; an unreadable record means that every file counts as the learner's own."""
    try:
        files = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
        return {name: dict(entry) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_record(folder: Path, record: dict[str, dict[str, str]]) -> None:
    _put(folder / RECORD, (json.dumps({"format": 1, "files": record}, indent=1) + "\n").encode())
