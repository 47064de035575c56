"""Where fetched sets are kept, and what says that one is whole.

<root>/<set>/                the set as it unpacked; it appears at once, by a rename
<root>/<set>/.complete.json  the marker: the pins that it came from, how many files, the checksum of SHA256SUMS
<root>/<set>/SHA256SUMS      the checksum of every file, which `sha256sum -c` reads too
<root>/downloads/<set>/      what is being fetched (.part), or what somebody put there by hand
<root>/locks/                one lock a set, and the claims of jobs that fetch it
"""

import hashlib
import json
import os
from pathlib import Path

from platformdirs import user_cache_path

from labkit.data.errors import DataError
from labkit.data.registry import RegistryEntry

_MARKER, _SUMS = ".complete.json", "SHA256SUMS"


def cache_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of fetched sets: `root`, else LABKIT_CACHE, else the platform's (~/.cache/labkit on Linux)."""
    named = root or os.environ.get("LABKIT_CACHE")
    return Path(named).expanduser().absolute() if named else user_cache_path("labkit", appauthor=False)


def is_complete(folder: Path, entry: RegistryEntry) -> bool:
    """Whether `folder` holds the whole set, unpacked from the files that the registry pins now."""
    try:
        return bool(_marker(folder)["pins"] == _pins(entry))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def write_marker(folder: Path, entry: RegistryEntry, digests: dict[str, str]) -> None:
    """Write the list of checksums, then the marker: `digests` maps each file's path within to its SHA-256."""
    sums = "".join(f"{digest}  {path}\n" for path, digest in sorted(digests.items()))
    (folder / _SUMS).write_text(sums, encoding="utf-8", newline="\n")
    marker = {"set": entry.name, "pins": _pins(entry), "files": len(digests), "sums": sha256_of(folder / _SUMS)}
    (folder / _MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")


def check_fetched(folder: Path) -> int:
    """Compare every file of a fetched set with its checksum; how many there are. Raises `DataError` at a difference."""
    sums = folder / _SUMS
    if not sums.exists() or sha256_of(sums) != _marker(folder).get("sums"):
        raise DataError(f"{sums} is missing or was changed; delete the folder {folder} and fetch the set again.")
    listed = sums.read_text(encoding="utf-8")
    count = check_sums(folder, listed, f"delete the folder {folder} and fetch the set again")
    known = {line.partition("  ")[2] for line in listed.splitlines()}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != _SUMS and not path.name.startswith(".") and name not in known:
            raise DataError(f"{path} is not part of the set; move it elsewhere.")
    return count


def check_sums(folder: Path, sums: str, remedy: str) -> int:
    """Compare the files below `folder` with the lines of a SHA256SUMS file; how many there are.

    Raises `DataError`, which ends in `remedy`, at the first file that is missing or differs.
    """
    lines = sums.splitlines()
    for line in lines:
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing; {remedy}.")
        if (actual := sha256_of(path)) != expected:
            raise DataError(f"{path} is damaged: its sha256 is {actual} instead of {expected}; {remedy}.")
    return len(lines)


def _pins(entry: RegistryEntry) -> dict[str, str]:
    return {file.name: file.digest for file in entry.files}


def _marker(folder: Path) -> dict[str, object]:
    content = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
