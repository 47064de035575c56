"""Where a rank is: the learner's line it executes, and the operation it waits in, read from its main thread's stack."""

import linecache
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

import torch.distributed as dist

from labkit.collectives.calls import transfers_begun, waiting

_LABKIT = str(Path(__file__).parent.parent)
_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_INTERNAL = ("<frozen", "<string>")


@dataclass(frozen=True)
class Whereabouts:
    """What a rank is doing, for people: `place` is "line 2" or "train.py, line 12", "" where unknown."""

    state: str  # "idle" or "busy"
    place: str = ""
    code: str = ""
    operation: str = ""  # the communication it is in, "" if none
    peer: int | None = None
    seconds: float = 0.0  # how long it has waited, 0 where unknown
    progress: tuple[int, int] = (0, 0)  # grows with every message and collective
    stack: str = ""

    def __str__(self) -> str:
        if self.state == "idle":
            return "finished"
        place = f", {self.place}" if self.place else ""
        if self.operation:
            peer = "" if self.peer is None else f" for rank {self.peer}"
            return f"waits{peer} in {self.operation}{place}"
        return f"is busy{place}" + (f": {self.code}" if self.code else "")


def is_users(filename: str) -> bool:
    """Whether a file is the learner's: no library's, none of labkit's."""
    return not filename.startswith((_LABKIT, *_LIBRARIES, *_INTERNAL))


def place_of(filename: str, line: int) -> str:
    """The place in words that are the same on every machine: no folders, no numbers of cells."""
    is_cell = filename.startswith("<") or "ipykernel" in filename or "ipython" in filename
    return f"line {line}" if is_cell else f"{Path(filename).name}, line {line}"


def of_traceback(tb: TracebackType | None) -> tuple[str, str]:
    """The place and the code of the innermost line of the learner's in a traceback."""
    place = code = ""
    for frame, line in traceback.walk_tb(tb):
        name = frame.f_code.co_filename
        if is_users(name):
            place, code = place_of(name, line), linecache.getline(name, line).strip()
    return place, code


def operation_in(frame: FrameType | None) -> str:
    """The communication that a stack is inside of: the outermost call of torch.distributed or labkit.collectives."""
    found = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_name
        communicates = module.startswith(("torch.distributed.distributed_c10d", "labkit.collectives."))
        if communicates and not name.startswith("_") and name not in ("wrapper", "operation", "wait", "resolve"):
            found = name
        frame = frame.f_back
    return found


def of_main_thread(busy: bool) -> Whereabouts:
    """Where this process's main thread is now. Called from another thread."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main or 0)
    if not busy or frame is None:
        return Whereabouts("idle")
    place = code = ""
    for inner, line in traceback.walk_stack(frame):  # the innermost first
        name = inner.f_code.co_filename
        if is_users(name):
            place, code = place_of(name, line), linecache.getline(name, line).strip()
            break
    wait = waiting.get(main or 0)
    stack = "".join(traceback.format_stack(frame))
    progress = transfers_begun(), _collectives_begun()
    if wait is not None:
        seconds = time.perf_counter() - wait.since
        return Whereabouts("busy", place, code, wait.operation, wait.peer, seconds, progress, stack)
    return Whereabouts("busy", place, code, operation_in(frame), None, 0.0, progress, stack)


def _collectives_begun() -> int:
    """How many collectives of torch.distributed this rank has begun on the world."""
    try:
        return int(cast(Any, dist.group.WORLD)._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return 0
