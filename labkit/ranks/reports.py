"""What a rank tells of an exception: in one line, as a traceback with the learner's lines, and of which sort it is."""

import contextlib
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from labkit.collectives.calls import unfinished
from labkit.ranks.channel import Unsendable
from labkit.ranks.whereabouts import of_traceback, operation_in, place_of, waits

STALE = "this group was built before the ranks were restarted: build it, and what uses it, again"
LOST_CONNECTION = (
    "the connection to another rank was lost, after a timeout that was caught perhaps: "
    "the next call has new ones, run this again"
)
_HERE = str(Path(__file__).parent)
_GLOO = re.compile(r"\[\S*gloo\S*:\d+\] ")
_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|socket|broken pipe|read error|write error|writev|readv|pair closure"
    r"|not connected|connectFullMesh|bad file descriptor",
    re.IGNORECASE,
)
# what gloo says of a connection on which something has timed out before
_CLOSED = "Application timeout caused pair closure"
_TIMEOUT = re.compile(r"timed out waiting|timeout waiting|wait timeout", re.IGNORECASE)
# what torch says of a group that has been left: DDP, fully_shard, a mesh
_LEFT = re.compile(r"is not initialized in the world group map|Could not resolve the process group")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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
    peer: int | None  # the rank that it waited for, None where unknown
    traceback: str
    unsendable: bool  # there is a result, but it can't travel
    unfinished: int  # transfers begun and not waited for: the group can't be used again if there are any
    exception: bytes | None = None

    def __str__(self) -> str:
        words = self.message.strip().splitlines()[0] if self.message.strip() else ""
        where = f" ({self.place})" if self.place else ""
        return f"{self.type}: {words}{where}" if words else f"{self.type}{where}"

    @property
    def signature(self) -> tuple[str, str, str]:
        """Equal for the same exception on several ranks."""
        return self.type, self.message, self.place

    @property
    def waiting(self) -> str:
        """What follows "wait", where that is what it did."""
        place = f", {self.place}" if self.place else ""
        return f"{waits(self.peer)} in {self.operation or 'communication'}{place}"


def kind_of(error: BaseException) -> str:
    """Whether an exception is the rank's own, or the echo of another's end."""
    if isinstance(error, RuntimeError):
        text = message_of(error)
        if _TIMEOUT.search(text):
            return "timeout"
        if _CLOSED in text or (_GLOO.search(text) and _CONNECTION.search(text)):
            return "connection"
    return "exception"


def message_of(error: BaseException) -> str:
    """The text of an exception, also of one that fails to give it."""
    try:
        return str(error)
    except BaseException as failure:
        return f"(its text can't be shown: __str__ raised {type(failure).__name__})"


def report(rank: int, error: BaseException, pack: Callable[[Any], bytes]) -> Report:
    """Describe `error`, caught in `rank`. `pack` turns an exception into bytes."""
    now = time.perf_counter()
    tb = error.__traceback__
    # the first frames are labkit's own, which called the learner's function
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_HERE) and tb.tb_next is not None:
        tb = tb.tb_next
    place, _ = of_traceback(tb)
    frames = [frame for frame, _ in traceback.walk_tb(tb)]
    text = "".join(traceback.format_exception(type(error), error, tb))
    data = None
    with contextlib.suppress(Exception):  # it can't travel: its text does
        data = pack(error.with_traceback(None))
    unsendable = isinstance(error, Unsendable)
    name = "TypeError" if unsendable else type(error).__name__
    message, kind = message_of(error), kind_of(error)
    if isinstance(error, SyntaxError):
        place, message = place_of(error.filename or "<cell>", error.lineno or 0), error.msg or message
    elif _LEFT.search(message):
        message = STALE
    # no addresses of memory, no lines of gloo's source: the text is the same in every run
    message = _ADDRESS.sub("", _GLOO.sub("", message))
    operation, peer = operation_in(frames), _peer_in(frames)
    return Report(rank, now, kind, name, message, place, operation, peer, text, unsendable, unfinished(), data)


def _peer_in(frames: list[FrameType]) -> int | None:
    """The rank that a message of labkit's was to come from or to go to."""
    for frame in reversed(frames):
        if frame.f_globals.get("__name__") == "labkit.collectives.messages":
            peer = getattr(frame.f_locals.get("self"), "peer", None)
            return peer if isinstance(peer, int) else None
    return None
