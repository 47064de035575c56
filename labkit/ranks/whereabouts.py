"""Where a rank is: the learner's line it executes, and the operation it waits in, read from its main thread's stack."""

import linecache
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch.distributed import distributed_c10d

from labkit.collectives.calls import transfers_begun, waiting
from labkit.ranks.phrases import SILENT

_LABKIT = str(Path(__file__).parent.parent)
_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_INTERNAL = ("<frozen", "<string>", "<attrs", "<__array_function__")
_COMMUNICATION = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn.functional",
    "labkit.collectives.",
)
_HELPERS = ("perform", "operation", "endpoint", "resolve")


@dataclass(frozen=True)
class Whereabouts:
    """What a rank is doing, for people: `place` is "line 2" or "train.py, line 12", "" where unknown."""

    state: str  # "idle", "busy", or "silent": inside code that holds Python's lock
    place: str = ""
    code: str = ""
    operation: str = ""  # the communication it is in, "" if none
    peer: int | None = None
    seconds: float = 0.0  # how long it has waited, 0 where unknown
    progress: tuple[int, int] = (0, 0)  # messages and collectives begun so far
    moment: float = 0.0  # perf_counter seconds
    processor: float = 0.0  # seconds of processor time that its main thread has used
    stack: str = ""

    def stands_still_since(self, before: "Whereabouts") -> bool:
        """Whether the rank waits as it did then, and has hardly used the processor in between."""
        same = (self.operation, self.place, self.progress) == (before.operation, before.place, before.progress)
        used = self.processor - before.processor
        return bool(self.operation) and same and used <= 0.1 * (self.moment - before.moment)

    @property
    def words(self) -> tuple[str, str]:
        """In the singular and in the plural."""
        place = f", {self.place}" if self.place else ""
        if self.operation:
            doing = f"{waits(self.peer)} in {self.operation}{place}"
            return f"waits{doing}", f"wait{doing}"
        code = f": {self.code}" if self.code else ""
        if self.state == "silent":
            return SILENT[0] + place + code, SILENT[1] + place + code
        return f"is busy{place}{code}", f"are busy{place}{code}"


def waits(peer: int | None) -> str:
    """What follows "wait": the rank that is waited for."""
    return "" if peer is None else f" for rank {peer}"


def is_users(filename: str) -> bool:
    """Whether a file is the learner's: no library's, none of labkit's."""
    return not filename.startswith((_LABKIT, *_LIBRARIES, *_INTERNAL))


def place_of(filename: str, line: int) -> str:
    """The place in words that are the same on every machine: no folders, no numbers of cells."""
    is_cell = filename.startswith("<") or "ipykernel" in filename or "ipython" in filename
    return f"line {line}" if is_cell else f"{Path(filename).name}, line {line}"


def of_traceback(tb: TracebackType | None) -> tuple[str, str]:
    """The place and the code of the innermost line of the learner's in a traceback."""
    return innermost(reversed([(frame, line) for frame, line in traceback.walk_tb(tb)]))


def innermost(lines: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """The place and the code of the first line of the learner's."""
    for frame, line in lines:
        name = frame.f_code.co_filename
        if is_users(name):
            return place_of(name, line), linecache.getline(name, line).strip()
    return "", ""


def operation_in(frames: Sequence[FrameType]) -> str:
    """The communication that is going on: the outermost call of torch.distributed or labkit.collectives. The frames
    are given from the outside to the inside."""
    for frame in frames:
        # a function inside another is named for that one
        name = frame.f_code.co_qualname.partition(".")[0]
        module = str(frame.f_globals.get("__name__", ""))
        if module == "torch.nn.parallel.distributed":
            return name
        if module.startswith(_COMMUNICATION) and name.islower() and name[0] != "_" and name not in _HELPERS:
            return name
    # calls into C++ that leave no frame of their own
    if frames and distributed_c10d.is_initialized():
        if str(frames[-1].f_globals.get("__name__", "")).startswith("torch.autograd"):
            return "backward"
        if ".wait(" in linecache.getline(frames[-1].f_code.co_filename, frames[-1].f_lineno):
            return "wait()"
    return ""


def of_main_thread(busy: bool, *, with_stack: bool = False) -> Whereabouts:
    """Where this process's main thread is now. Called from another thread."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main or 0)
    if not busy or frame is None:
        return Whereabouts("idle")
    stack = list(traceback.walk_stack(frame))  # the innermost first
    place, code = innermost(stack)
    operation, peer, seconds = _waiting_in(stack, main or 0)
    shown = "".join(traceback.format_stack(frame)) if with_stack else ""
    return Whereabouts(
        "busy",
        place,
        code,
        operation,
        peer,
        seconds,
        progress=(transfers_begun(), _collectives_begun()),
        moment=time.perf_counter(),
        processor=_processor_seconds(main or 0),
        stack=shown,
    )


def _waiting_in(stack: list[tuple[FrameType, int]], main: int) -> tuple[str, int | None, float]:
    """The operation, the peer where it is known, and the seconds where they are."""
    frames = [frame for frame, _ in reversed(stack)]
    wait = waiting.get(main)
    if wait is None and any(frame.f_globals.get("__name__") == "labkit.collectives.background" for frame in frames):
        # the collective that the main thread waits for goes on in another
        thread, wait = next(iter([*waiting.items(), (main, None)]))
        frames = _frames_of(thread)
    if wait is None:
        return operation_in(frames), None, 0.0
    return operation_in(frames) or wait.operation, wait.peer, time.perf_counter() - wait.since


def _frames_of(thread: int) -> list[FrameType]:
    """The stack of a thread, from the outside to the inside; empty if it has ended."""
    found = sys._current_frames().get(thread)
    return [frame for frame, _ in traceback.walk_stack(found)][::-1] if found else []


def _collectives_begun() -> int:
    """How many calls of torch.distributed this rank has begun, over all groups."""
    total = 0
    group: Any
    for group in list(distributed_c10d._world.pg_map):
        try:
            total += int(group._get_sequence_number_for_group())
        except RuntimeError:  # a backend that does not count
            continue
    return total


def _processor_seconds(thread: int) -> float:
    """The processor time of a thread: it stands still while the thread waits. 0 where it can't be known."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
