"""Ending a rank with all that it has started."""

import contextlib
import os
import signal

import psutil


def end_tree(pid: int) -> None:
    """Kill the process, its descendants, and whoever is left of its process group. Those that are gone are no error."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        # a descendant may have left the group
        for one in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                one.kill()
    for kill in (getattr(os, "killpg", None), os.kill):
        if kill is not None:
            with contextlib.suppress(OSError):
                kill(pid, signal.SIGKILL)


def end_myself() -> None:
    """Kill this rank's descendants and its process group, itself included."""
    end_tree(os.getpid())
    os._exit(1)
