"""One rank as seen from outside: its process, the connection to it, and the pipe with what it writes."""

import contextlib
import os
import threading
from collections import deque
from multiprocessing import Pipe
from multiprocessing.process import BaseProcess
from typing import Any

from labkit.ranks import channel, entry
from labkit.ranks.ending import end_group, end_tree
from labkit.ranks.forking import new_process
from labkit.ranks.jobs import Job

_MOST = 1 << 20  # bytes of output taken at a time
_SMALL = 1 << 15  # bytes that a connection takes without being read at once


class Member:
    """One rank. `offset` is what to add to its clock to have it on ours, in seconds."""

    def __init__(self, job: Job) -> None:
        self.rank, self.offset, self.preloaded = job.rank, 0.0, False
        self.connection, theirs = Pipe()
        self.output, writer = Pipe(duplex=False)
        self._outbox: deque[tuple[Any, bytes | None]] = deque()
        self._lock = threading.Lock()
        self._sending = False
        self._held = b""
        try:
            self.process: BaseProcess = new_process(entry.main, (job, theirs, writer), name=f"labkit-rank-{job.rank}")
        except BaseException:
            self.connection.close()
            self.output.close()
            raise
        finally:
            theirs.close()
            writer.close()
        os.set_blocking(self.output.fileno(), False)

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def tell(self, message: Any, load: bytes | None = None) -> None:
        """Send a message, after those before it. What is large leaves in the background, since a rank may be too busy
        to take it. A rank that is gone hears nothing; its end is noticed elsewhere."""
        with self._lock:
            self._outbox.append((message, load))
            if self._sending:
                return
            self._sending = True
        if load is None or len(load) < _SMALL:
            self._send()
        else:
            threading.Thread(target=self._send, name="labkit-send", daemon=True).start()

    def _send(self) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    self._sending = False
                    return
                message, load = self._outbox.popleft()
            with contextlib.suppress(OSError):
                channel.send(self.connection, message, load)

    def read_output(self) -> bytes:
        """What the rank has written since, without waiting; the rest at the next call if it is much."""
        self.hold_output()
        written, self._held = self._held, b""
        return written

    def hold_output(self) -> None:
        """Take what the rank has written, so that it can go on writing, and keep it for `read_output`."""
        with contextlib.suppress(OSError):  # nothing more for now
            while len(self._held) < _MOST and (piece := os.read(self.output.fileno(), _MOST)):
                self._held += piece

    def kill(self) -> None:
        """End the rank and all that it has started. Does not wait for it."""
        if self.process.exitcode is None:
            end_tree(self.pid)
        else:
            end_group(self.pid)

    def release(self) -> None:
        """Wait for the process to be gone, and close what connects to it."""
        self.process.join(5)
        self.abandon()

    def abandon(self) -> None:
        """Close what connects to the rank, without a word to it."""
        for one in (self.connection, self.output):
            with contextlib.suppress(OSError):
                one.close()
