"""The temporary folder that ranks meet in: one FileStore a group, so that there are no ports to collide.

The ranks make it, not the process that starts them: what exists is then always known to somebody who outlives a crash.
"""

import glob
import os
import secrets
import shutil
import tempfile


def new_folder() -> str:
    """A name for a folder of this process, not made yet."""
    return _beginning(os.getpid()) + secrets.token_hex(8)


def make(folder: str) -> None:
    """Make the folder, unless another rank has."""
    os.makedirs(folder, mode=0o700, exist_ok=True)


def path(folder: str, number: int) -> str:
    """The file of the `number`th group."""
    return os.path.join(folder, f"group-{number}")


def remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def remove_all_of(owner: int) -> None:
    """Remove every folder that process `owner` has named."""
    for folder in glob.glob(glob.escape(_beginning(owner)) + "*"):
        remove(folder)


def _beginning(owner: int) -> str:
    return os.path.join(tempfile.gettempdir(), f"labkit-ranks-{owner}-")
