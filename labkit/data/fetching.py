"""Bringing a set here, once and whole: `fetch`, and what is asked about it afterwards."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labkit.data.archive import extract
from labkit.data.cache import cache_root, check_fetched, check_sums, is_complete, sha256_of, write_marker
from labkit.data.downloading import Patience, download, mismatch
from labkit.data.embedded import data_folder
from labkit.data.errors import DataError
from labkit.data.registry import REGISTRY, RegistryEntry, lookup
from labkit.data.turns import Turn, current_job, local_rank

_Notice = Callable[[str], None]
Root = str | os.PathLike[str] | None


@dataclass(frozen=True)
class SetStatus:
    """What is here of one set: "embedded", "complete", "partial" (a fetch broke off), or "absent"."""

    entry: RegistryEntry
    state: Literal["embedded", "complete", "partial", "absent"]
    path: Path


def fetch(
    name: str | RegistryEntry,
    *,
    root: Root = None,
    rank: int | None = None,
    job: str | None = None,
    progress: bool = True,
    patience: Patience | None = None,
    start_timeout: float = 120.0,
    settle: float = 10.0,
) -> Path:
    """Bring the set `name` here unless it is here already; the folder that holds it.

    The files are downloaded (resumed, checked by size and checksum), unpacked into a temporary folder, and renamed, so
    that a set is either absent or whole; then the downloaded files are removed. Where they go is `root`, else the
    folder that LABKIT_CACHE names, else the platform's cache folder. An embedded set is only looked up.

    Every rank of a job calls this; rank 0 fetches and the others wait for it without a time limit. `rank` is taken from
    LOCAL_RANK, else RANK, else the process group, when not given: one rank a machine fetches, for the cache may be the
    machine's own; where machines share a cache, the lock lets one of them fetch and the others find it. `job` names
    what the ranks have in common, by default the process that started them. `start_timeout` bounds the wait (seconds)
    for rank 0 to begin, `settle` how long an earlier failure of the same job may be taken for one about to be tried
    again.

    Raises `DataError`, in one sentence and the same on every rank, when the set can't be had.
    """
    entry = lookup(name) if isinstance(name, str) else name
    if entry.embedded:
        return path(entry)
    place = cache_root(root)
    folder = place / entry.name
    if not is_complete(folder, entry):
        turn = Turn(place / "locks", entry.name, job or current_job())
        with _disk_errors(entry, place):
            if (local_rank() if rank is None else rank) == 0:
                notice = _say if progress else _say_nothing
                with turn.lead(notice), _disk_errors(entry, place):
                    if not is_complete(folder, entry):
                        _prepare(entry, place, notice, progress, patience)
            else:
                turn.follow(lambda: is_complete(folder, entry), start_timeout=start_timeout, settle=settle)
    return folder / entry.folder


def path(name: str | RegistryEntry, *, root: Root = None) -> Path:
    """The folder of a set that is here. Raises `DataError`, which says how to get it, when it is not."""
    entry = lookup(name) if isinstance(name, str) else name
    if entry.embedded:
        return _embedded_folder() / entry.name
    folder = cache_root(root) / entry.name
    if not is_complete(folder, entry):
        raise DataError(f"{entry.name} is not in {folder.parent}; fetch it: labkit data fetch {entry.name}.")
    return folder / entry.folder


def verify(name: str | RegistryEntry, *, root: Root = None) -> int:
    """Compare every file of a set that is here with its checksum; how many files there are.

    Raises `DataError` at the first file that is missing, damaged, or not part of the set, and when the set isn't here.
    """
    entry = lookup(name) if isinstance(name, str) else name
    path(entry, root=root)
    if not entry.embedded:
        return check_fetched(cache_root(root) / entry.name)
    place = _embedded_folder()
    sums = place / "SHA256SUMS"
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else []
    own = [line for line in lines if line.partition("  ")[2].startswith(f"{entry.name}/")]
    if not own:
        raise DataError(f"{sums} does not list the files of {entry.name}; restore it with git.")
    return check_sums(place, "\n".join(own), "restore it with git")


def status(*, root: Root = None) -> list[SetStatus]:
    """Every known set, embedded ones first, and what is here of it."""
    place = cache_root(root)
    found: list[SetStatus] = []
    for entry in REGISTRY.values():
        folder, downloads = place / entry.name, place / "downloads" / entry.name
        if entry.embedded:
            found.append(SetStatus(entry, "embedded", _embedded_folder() / entry.name))
        elif is_complete(folder, entry):
            found.append(SetStatus(entry, "complete", folder / entry.folder))
        elif downloads.is_dir() and any(downloads.iterdir()):
            found.append(SetStatus(entry, "partial", downloads))
        else:
            found.append(SetStatus(entry, "absent", folder))
    return found


def _prepare(entry: RegistryEntry, place: Path, notice: _Notice, progress: bool, patience: Patience | None) -> None:
    """Download, unpack, rename; the caller holds the lock, so what an earlier fetch left half-done is nobody's."""
    folder, downloads, unpacking = (
        place / entry.name,
        place / "downloads" / entry.name,
        place / f".{entry.name}.unpacking",
    )
    if folder.exists():
        raise DataError(
            f"{folder} is there but is not the complete set {entry.name}, or comes from other files than this version "
            "of labkit expects; delete it or move it elsewhere, then fetch again."
        )
    for file in entry.files:
        target = downloads / file.name
        if not target.exists():
            download(file, target, progress=progress, patience=patience)
        elif wrong := mismatch(target, file):
            raise DataError(f"{target} is not the file that labkit expects: {wrong}. Delete it, and fetch again.")
    shutil.rmtree(unpacking, ignore_errors=True)
    unpacking.mkdir()
    try:
        digests: dict[str, str] = {}
        for file in entry.files:
            if entry.archive:
                notice(f"Unpacking {file.name}.")
                digests |= extract(downloads / file.name, unpacking, limit=entry.unpacked_limit)
            else:
                digests |= _copy_in(downloads / file.name, unpacking)
        if not (unpacking / entry.folder).is_dir():
            raise DataError(f"{entry.name} unpacked without the folder {entry.folder!r} that it should hold.")
        write_marker(unpacking, entry, digests)
        if hasattr(os, "sync"):
            os.sync()  # else a power cut could leave empty files under the name that says whole
        unpacking.rename(folder)
    finally:
        shutil.rmtree(unpacking, ignore_errors=True)
    shutil.rmtree(downloads, ignore_errors=True)


def _copy_in(file: Path, folder: Path) -> dict[str, str]:
    copy = folder / file.name
    shutil.copyfile(file, copy)
    return {file.name: sha256_of(copy)}


@contextmanager
def _disk_errors(entry: RegistryEntry, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{entry.name} could not be stored in {place}: {error.strerror or error}. Make room, mend the permissions, "
            "or set LABKIT_CACHE to another folder."
        ) from None


def _embedded_folder() -> Path:
    try:
        return data_folder()
    except FileNotFoundError as error:
        raise DataError(str(error)) from None


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def _say_nothing(sentence: str) -> None:
    pass
