"""Find the processes that a lesson left behind, however they detached themselves.

A process that starts a session of its own and whose parent has ended is no longer among anybody's children. So a run
is marked by an environment variable, which every descendant inherits and which its process entry shows to the end.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

MARK = "LABKIT_RUN"


@contextmanager
def marked() -> Iterator[str]:
    """Processes that start within the block carry a mark of its own, which is yielded."""
    mark, before = uuid.uuid4().hex, os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield mark
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before


def marked_processes(mark: str) -> list[psutil.Process]:
    """The running processes with this mark, this one and those that have ended apart."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
            if alive and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or another user's
    return found


def end_leftovers(mark: str, grace: float = 10.0) -> list[str]:
    """The commands of marked processes that are still there after `grace` seconds; they are killed."""
    deadline = time.monotonic() + grace
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = []
    for process in left:
        try:
            commands.append(" ".join(process.cmdline())[:80] or process.name())
            process.kill()
        except psutil.Error:
            continue
    return commands
