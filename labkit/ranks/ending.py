"""Ending a rank with all that it has started."""

import contextlib
import os
import signal

import psutil


def end_tree(pid: int) -> None:
    """Kill the process, its descendants, and its process group. Those that are gone are no error."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        # a descendant may have left the group
        for one in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                one.kill()
    end_group(pid)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def end_group(pid: int) -> None:
    """Kill whoever is left of the process group that the process `pid` has led."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def end_myself() -> None:
    """Kill this rank's descendants and its process group, itself included."""
    end_tree(os.getpid())
    os._exit(1)
