"""From what a user gives, the name of a set or a path, to the folder to read."""

from pathlib import Path
from typing import Literal

from labkit.data.errors import DataError
from labkit.data.fetching import path
from labkit.data.registry import lookup


def locate(name: str | Path, kind: Literal["image", "text"], folder: str | Path | None) -> tuple[str, Path]:
    """The registered name of a set ("" for a path of the user's own) and where it is.

    A registered set is where `folder` says or, without it, embedded or where `labkit data fetch` put it. Raises
    `DataError`, in one sentence, for an unknown name, a set of the other kind, or one that isn't there.
    """
    try:
        entry = lookup(str(name))
    except DataError:
        if Path(name).exists():
            return "", Path(name)
        raise
    if entry.kind != kind:
        other = "text" if kind == "image" else "images"
        raise DataError(f"{entry.name} is a set of {entry.kind}s: open it with labkit.data.{other}.")
    if folder is not None and not Path(folder).is_dir():
        raise DataError(f"There is no folder {folder}: give the one that {entry.name} was unpacked to.")
    return entry.name, path(entry) if folder is None else Path(folder)


def find_layout(folder: Path, marker: str, *, what: str) -> Path:
    """`folder`, or the first folder in it, that contains `marker`, a path that only this set's layout has.

    An archive unpacks to a folder of its own, and users point at either. Raises `DataError` where neither has it.
    """
    for candidate in [folder, *sorted(inner for inner in folder.glob("*") if inner.is_dir())]:
        if (candidate / marker).exists():
            return candidate
    raise DataError(
        f"{folder} does not hold {what}, as there is no {marker} in it: give the folder it was unpacked to."
    )


def check_request(split: str, limit: int | None) -> None:
    """Only "train" and "test" are splits here; "test" is the labelled part held out, whatever its folder is called."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}: it is how many samples to keep.")


def spread(total: int, limit: int | None) -> list[int]:
    """`limit` of `total` positions, evenly spread: a folder's files are in order of class, so the first won't do."""
    count = min(limit or total, total)
    return [i * total // count for i in range(count)]
