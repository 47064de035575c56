"""A rank's stdout and stderr: both lead to the process that started it, whatever the learner's code does to them."""

import contextlib
import ctypes
import os
import sys
from multiprocessing.connection import Connection
from typing import TextIO


class Streams:
    """File descriptors 1 and 2 of this process, and Python's streams on them, writing into `output`."""

    def __init__(self, output: Connection) -> None:
        # kept: the learner's code may close 1 and 2
        self.pipe = os.dup(output.fileno())
        output.close()
        self.out: TextIO | None = None
        self.err: TextIO | None = None
        self.restore()

    def restore(self) -> None:
        """Undo what was closed or replaced."""
        for number in (1, 2):
            with contextlib.suppress(OSError):
                os.dup2(self.pipe, number)
        if self.out is None or self.out.closed:
            self.out = _stream(1)
        if self.err is None or self.err.closed:
            self.err = _stream(2)
        sys.stdout, sys.stderr = self.out, self.err

    def flush(self) -> None:
        """Write out what print and C code have buffered."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(OSError, AttributeError, TypeError):  # no C library to ask
            ctypes.CDLL(None).fflush(None)


def _stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
