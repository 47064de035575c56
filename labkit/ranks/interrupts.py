"""The stop button while ranks are at work: it is noticed at once, and KeyboardInterrupt comes when all is in order.

Raised wherever it hits, it could cut a message in two. After three presses it is raised nevertheless.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

MOST = 3


class Interrupts:
    """How often the stop button was pressed; `bell` becomes readable when it is."""

    def __init__(self) -> None:
        self.pressed = 0
        self.bell, self._hammer = socket.socketpair()
        self._hammer.setblocking(False)

    def press(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.pressed += 1
        if self.pressed >= MOST:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # rung enough
            self._hammer.send(b"!")

    def heard(self) -> None:
        """Let the bell be silent until the next press."""
        self.bell.recv(MOST)

    def close(self) -> None:
        self.bell.close()
        self._hammer.close()


@contextlib.contextmanager
def held_back() -> Iterator[Interrupts]:
    """Inside, an interrupt is counted rather than raised; the caller raises KeyboardInterrupt at the end if there was
    one. In another thread than the main one, where Python raises none, and where they are ignored, nothing changes."""
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    handles = main and callable(before)
    try:
        if handles:
            signal.signal(signal.SIGINT, interrupts.press)
        yield interrupts
    finally:
        if handles:
            signal.signal(signal.SIGINT, before)
        interrupts.close()
