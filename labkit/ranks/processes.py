"""Starting and ending the processes of ranks.

On Linux they are forked from multiprocessing's fork server, which has imported torch already; elsewhere they are
spawned. The caller's `__main__` is never imported in a rank, so a script needs no guard.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from labkit.ranks import channel, worker

PRELOAD = ["torch", "torch.distributed", "cloudpickle", "labkit.ranks.worker"]


def context() -> Any:
    """The way to start processes here: the fork server on Linux, spawn on macOS and Windows."""
    method = "forkserver" if sys.platform == "linux" else "spawn"
    chosen = multiprocessing.get_context(method)
    if method == "forkserver":
        chosen.set_forkserver_preload(PRELOAD)
    return chosen


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide `__main__` from multiprocessing, which would run the caller's script again in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def warm_up() -> None:
    """Let the fork server import torch in the background, so that the first ranks start sooner. Returns at once."""
    if sys.platform == "linux":
        context()
        with _without_main():
            forkserver.ensure_running()


@dataclass
class Member:
    """One rank as seen from outside."""

    rank: int
    process: BaseProcess
    connection: Connection
    output: Connection
    offset: float = 0.0  # seconds to add to the rank's clock to have it on ours
    preloaded: bool = False
    pid: int = 0

    def tell(self, message: Any) -> None:
        """Send a message; a rank that is gone hears nothing."""
        with contextlib.suppress(OSError):  # its end is noticed by its sentinel
            self.connection.send_bytes(channel.pack(message))

    def read_output(self) -> bytes:
        """What the rank has written since, without waiting."""
        pieces = []
        with contextlib.suppress(OSError):  # nothing more for now
            while piece := os.read(self.output.fileno(), 1 << 20):
                pieces.append(piece)
        return b"".join(pieces)

    def kill(self) -> None:
        """End the rank and all that it has started."""
        if self.pid and hasattr(os, "killpg"):
            with contextlib.suppress(OSError):  # gone already
                os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()

    def release(self) -> None:
        """Wait for the process to be gone, and close what connects to it."""
        self.process.join(5)
        self.connection.close()
        self.output.close()


def start(job: worker.Job) -> Member:
    """Start one rank; it tells "ready" when its group is complete."""
    chosen = context()
    ours, theirs = chosen.Pipe()
    reader, writer = chosen.Pipe(duplex=False)
    # not daemonic: a DataLoader with workers must run in a rank
    process = chosen.Process(
        target=worker.main, args=(job, theirs, writer), name=f"labkit-rank-{job.rank}", daemon=False
    )
    with _without_main():
        process.start()
    theirs.close()
    writer.close()
    os.set_blocking(reader.fileno(), False)
    return Member(job.rank, process, ours, reader)


class Stores:
    """The temporary folder with one FileStore a group: no ports that could collide."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="labkit-")
        self.count = 0

    def new(self) -> str:
        self.count += 1
        return os.path.join(self.folder, f"group-{self.count}")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
