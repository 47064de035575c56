"""Files that survive a crash: written, synced to the disk, and made visible by one rename.

A snapshot is a folder. It is written as `.saving-...` and renamed when all is on the disk, so that a folder called
`step-...` was whole at that moment. One that is to go is renamed first, too.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file

from labkit.train.snapshot_exchange import SnapshotError
from labkit.train.snapshot_index import INDEX, Index

_STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")
_SAVING, _REMOVING = ".saving-", ".removing-"
LOCK_LIMIT = 60.0  # seconds that another job may take to save into the same folder


def sync(path: Path) -> None:
    """Return when the file or folder is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no such call for folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
    """Write a safetensors file to the disk; returns its bytes and SHA-256. Tensors may be on any device, of any
    stride, and share memory."""
    ready: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        ready[name] = copy.clone() if copy.data_ptr() in seen else copy
        seen.add(ready[name].data_ptr())
    try:
        save_file(ready, path)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error).removeprefix("Error while serializing: ")) from None
    sync(path)
    return path.stat().st_size, digest(path)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a text to the disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def candidates(folder: Path) -> list[Path]:
    """The snapshots in a folder, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _STEP.fullmatch(path.name)), key=lambda p: _order(p.name))[::-1]


def _order(name: str) -> tuple[int, int]:
    """The step in a snapshot's name, and which of this step it is."""
    match = _STEP.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, made if need be, which ends with the process that holds it. What a killed process left
    behind half written is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock", timeout=LOCK_LIMIT).acquire()
    except Timeout:
        raise SnapshotError(f"another process has been saving into it for {LOCK_LIMIT:g} s") from None
    with lock:
        for path in folder.glob(".*-*"):
            if path.name.startswith((_SAVING, _REMOVING)):
                shutil.rmtree(path, ignore_errors=True)
        yield


def begin(folder: Path) -> Path:
    """A new folder to write a snapshot into."""
    path = folder / f"{_SAVING}{uuid.uuid4().hex[:8]}"
    path.mkdir()
    return path


def publish(saving: Path, step: int) -> Path:
    """Make what was written the snapshot of this step. An earlier one of the same step stays beside it."""
    folder = saving.parent
    sync(saving)
    same = [_order(path.name) for path in candidates(folder) if _order(path.name)[0] == step]
    again = 1 + max(generation for _, generation in same) if same else 0
    target = folder / (f"step-{step:010d}" + (f".{again}" if again else ""))
    saving.rename(target)
    sync(folder)
    return target


def remove(path: Path) -> None:
    """Remove a snapshot: at every moment it is either whole or not there."""
    going = path.parent / f"{_REMOVING}{uuid.uuid4().hex[:8]}"
    with contextlib.suppress(OSError):  # another process was faster
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def read_index(path: Path) -> Index:
    """The index of a snapshot, checked. SnapshotError says what is wrong with it."""
    try:
        text = (path / INDEX).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SnapshotError(f"{INDEX} is missing") from None
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{INDEX} can't be read ({error})") from None
    return Index.from_text(text)


def check_file(path: Path, size: int, sha256: str) -> None:
    """Raise SnapshotError where a file is not what was written."""
    try:
        found = path.stat().st_size
        if found != size:
            raise SnapshotError(f"{path.name} has {found} bytes, not {size}")
        if digest(path) != sha256:
            raise SnapshotError(f"{path.name} was changed after it was written (its checksum differs)")
    except FileNotFoundError:
        raise SnapshotError(f"{path.name} is missing") from None
    except OSError as error:
        raise SnapshotError(f"{path.name} can't be read ({error})") from None
