"""Ending a run from outside: Ctrl-C and SIGTERM, and a file that says so to ranks whose signals belong to others."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_SAY = "\nlabkit: stopping after the running step; once more stops at once\n"


class StopRequest:
    """Whether the run should end. `signal_name` says why: "SIGINT", "SIGTERM", or "" while nothing was asked."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.signal_name = ""

    @property
    def asked(self) -> bool:
        """Whether a signal came, or the file is there."""
        if not self.signal_name and self.file is not None and self.file.exists():
            with contextlib.suppress(OSError):
                self.signal_name = self.file.read_text() or "SIGTERM"
        return bool(self.signal_name)

    def ask(self, name: str) -> None:
        """Ask for the end, here and, where there is a file, of all who look at it."""
        self.signal_name = name
        if self.file is not None:
            self.file.write_text(name)


@contextlib.contextmanager
def listening(request: StopRequest, *signals: signal.Signals, say: bool = True) -> Iterator[None]:
    """Turn the signals into a request while the body runs. The second one does what it did before.

    Only the main thread can listen; in another nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.signal_name:
            restore()
            signal.raise_signal(number)
            return
        request.ask(signal.Signals(number).name)
        if say:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # print is not safe in here
                os.write(sys.__stderr__.fileno(), _SAY.encode())  # type: ignore[union-attr]

    before = {one: signal.signal(one, on_signal) for one in signals}

    def restore() -> None:
        for one, handler in before.items():
            signal.signal(one, handler if handler is not None else signal.SIG_DFL)

    try:
        yield
    finally:
        restore()
