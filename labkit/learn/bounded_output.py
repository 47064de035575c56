"""Letting a learner's function print, but not without end: what it writes is passed on up to a limit, then swallowed.

`print` is passed on at once, so that it is seen even if the process dies next. What C code or a started program writes
to the file descriptors 1 and 2 goes through a pipe, which is always drained.
"""

import os
import sys
import threading
from types import TracebackType
from typing import Any

from labkit.words import _

LIMIT = 10_000  # bytes a rank and trial


class BoundedOutput:
    """A context manager for a rank: at most `limit` bytes of what the body writes leave the process."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.left = limit
        self.lock = threading.Lock()
        self.cut = False

    def __enter__(self) -> "BoundedOutput":
        sys.stdout.flush()
        sys.stderr.flush()
        self.streams = sys.stdout, sys.stderr
        self.saved = [os.dup(1), os.dup(2)]
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        self.drain = threading.Thread(target=self._drain, args=(reader,), name="labkit-output", daemon=True)
        self.drain.start()
        sys.stdout = _Stream(self, self.streams[0])
        sys.stderr = _Stream(self, self.streams[1])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        sys.stdout, sys.stderr = self.streams
        for stream in self.streams:
            stream.flush()  # what was written to its buffer directly
        os.dup2(self.saved[0], 1)
        os.dup2(self.saved[1], 2)
        # a program that the learner started may still hold the pipe; it is not waited for
        self.drain.join(0.5)
        if not self.drain.is_alive():
            for fd in self.saved:
                os.close(fd)

    def write(self, data: bytes) -> None:
        """Pass on what the limit still allows; say once that the rest is left out."""
        with self.lock:
            taken, self.left = data[: self.left], max(0, self.left - len(data))
            if taken:
                self._pass_on(taken)
            if len(taken) < len(data) and not self.cut:
                self.cut = True
                self._pass_on(b"\n[" + _("more was printed, which is left out here").encode() + b"]\n")

    def _pass_on(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.saved[0], data) :]

    def _drain(self, reader: int) -> None:
        while data := os.read(reader, 1 << 16):
            self.write(data)
        os.close(reader)


class _Stream:
    """Stands in for sys.stdout or sys.stderr."""

    def __init__(self, bounded: BoundedOutput, stream: Any) -> None:
        self._bounded, self._stream = bounded, stream

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._bounded.write(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        pass  # everything is written at once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
