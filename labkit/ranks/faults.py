"""The stack of a rank that can't tell it itself: one that a signal ends, or that is inside code holding Python's lock.

Python's faulthandler writes it, into a file beside the groups' stores; the process that started the ranks reads it.
"""

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from pathlib import Path

from labkit.ranks.whereabouts import Whereabouts, is_users, place_of

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in ', re.MULTILINE)
_WAIT = 0.5  # seconds that a stack may take to be written


def watch(folder: str, rank: int) -> None:
    """Called in a rank, once its folder is there."""
    file = Path(folder, f"stack-{rank}").open("w")  # noqa: SIM115  # open as long as the rank lives
    faulthandler.enable(file, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file, all_threads=False, chain=False)


def read(folder: str, rank: int) -> Whereabouts | None:
    """Where a rank was that is dead; None where nothing was written."""
    try:
        text = Path(folder, f"stack-{rank}").read_text(errors="replace")
    except OSError:
        return None
    # what follows the stack is a list of modules
    stack = text.rpartition("Extension modules:")[0] or text
    for frame in _FRAME.finditer(stack):  # the innermost first
        if is_users(frame["file"]):
            name, line = frame["file"], int(frame["line"])
            return Whereabouts("busy", place_of(name, line), linecache.getline(name, line).strip(), stack=stack)
    return Whereabouts("busy", stack=stack) if stack else None


def provoke(folder: str, rank: int, pid: int) -> Whereabouts | None:
    """Where a rank is that does not answer."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR1)
    end = time.perf_counter() + _WAIT
    while (found := read(folder, rank)) is None and time.perf_counter() < end:
        time.sleep(0.01)
    return found
