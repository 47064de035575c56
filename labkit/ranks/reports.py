"""What a rank tells of an exception: in one line, as a traceback with the learner's lines, and of which sort it is."""

import re
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.collectives.calls import unfinished
from labkit.ranks.whereabouts import of_traceback, operation_in

_HERE = str(Path(__file__).parent)
_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|socket|broken pipe|read error|write error|writev|readv|pair closure"
    r"|transport/tcp|not connected|connectFullMesh",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed out waiting|timeout waiting|wait timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Report:
    """An exception in a rank, ready to travel."""

    rank: int
    time: float  # perf_counter seconds, on the clock that the processes of one machine share
    kind: str  # "exception", "connection" (its peer was gone) or "timeout" (it waited in vain)
    type: str
    message: str
    place: str
    operation: str  # the communication it was in, "" if none
    traceback: str
    unfinished: int  # transfers begun and not waited for: the group can't be used again if there are any
    exception: bytes | None = None

    def __str__(self) -> str:
        words = self.message.splitlines()[0] if self.message else ""
        where = f" ({self.place})" if self.place else ""
        return f"{self.type}: {words}{where}" if words else f"{self.type}{where}"

    @property
    def signature(self) -> tuple[str, str, str]:
        """Equal for the same exception on several ranks."""
        return self.type, self.message, self.place


def kind_of(error: BaseException) -> str:
    """Whether an exception is the rank's own, or the echo of another's end."""
    if isinstance(error, RuntimeError):
        if _TIMEOUT.search(str(error)):
            return "timeout"
        if _CONNECTION.search(str(error)):
            return "connection"
    return "exception"


def report(rank: int, error: BaseException, pack: Any) -> Report:
    """Describe `error`, caught in `rank`. `pack` turns an exception into bytes."""
    now = time.perf_counter()
    tb = error.__traceback__
    # the first frames are labkit's own, which called the learner's function
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_HERE) and tb.tb_next is not None:
        tb = tb.tb_next
    place, _ = of_traceback(tb)
    last = tb
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    text = "".join(traceback.format_exception(type(error), error, tb))
    try:
        data = pack(error.with_traceback(None))
    except Exception:
        data = None
    name, message = type(error).__name__, str(error)
    if isinstance(error, SyntaxError):
        place, message = f"line {error.lineno}", error.msg or message
    inside = operation_in(last.tb_frame if last else None)
    return Report(rank, now, kind_of(error), name, message, place, inside, text, unfinished(), data)
