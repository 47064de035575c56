"""A rank: the process that runs functions and cells, and a thread of it that listens while they run.

The thread answers "where are you?", delivers interrupts, and, when the process that started the ranks is gone, ends
this process and all that it has started. So nothing outlives the notebook.
"""

import atexit
import contextlib
import ctypes
import os
import queue
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from labkit.collectives.background import forget_threads
from labkit.collectives.calls import forget_unfinished
from labkit.collectives.groups import forget_endpoints
from labkit.collectives.network import Network
from labkit.collectives.settings import configure
from labkit.ranks import cells, channel, sources, whereabouts
from labkit.ranks.reports import Report, report
from labkit.ranks.sockets import shut_connections
from labkit.record import RankRecord, Recorder, set_rank

_PR_SET_PDEATHSIG = 1  # prctl(2)
# another process than the rank itself where the fork server has preloaded this module
_IMPORTED_BY = os.getpid()


@dataclass(frozen=True)
class Job:
    """How a rank is to start. Everything is explicit: the process that forks ranks has an environment of its own."""

    rank: int
    world_size: int
    backend: str
    timeout: float
    threads: int
    store: str
    network: Network | None
    check: bool
    environment: dict[str, str]
    path: list[str]
    folder: str


@dataclass(frozen=True)
class Call:
    """One thing to run: a packed (function, args, kwargs), or the source of a cell."""

    number: int
    payload: bytes
    record: bool
    lines: sources.Sources = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of a call: a packed result, or a report; and what was recorded."""

    number: int
    result: bytes | None
    report: Report | None
    record: RankRecord | None


class Worker:
    """The state of a rank between calls."""

    def __init__(self, job: Job, connection: Connection, preloaded: bool) -> None:
        self.job, self.connection, self.preloaded = job, connection, preloaded
        self.calls: queue.Queue[Any] = queue.Queue()
        self.busy = False
        self.lock = threading.Lock()
        self.namespace = cells.new_namespace(job.rank, job.world_size)

    def tell(self, message: Any) -> None:
        with self.lock:
            self.connection.send_bytes(channel.pack(message))

    # --- the listening thread ---

    def listen(self) -> None:
        try:
            while True:
                self.hear(channel.unpack(self.connection.recv_bytes()))
        except (EOFError, OSError):
            # the process that started us is gone without a word
            shutil.rmtree(os.path.dirname(self.job.store), ignore_errors=True)
            end_process_group()

    def hear(self, message: Any) -> None:
        match message:
            case ("where",):
                self.tell(("where", whereabouts.of_main_thread(self.busy)))
            case ("clock",):
                self.tell(("clock", time.perf_counter()))
            case ("free",):
                shut_connections()
            case ("interrupt",):
                if self.busy:
                    os.kill(os.getpid(), signal.SIGINT)
                    # a rank blocked inside gloo hears of it only when its wait ends
                    threading.Timer(0.3, self.free_if_busy).start()
            case _:
                self.calls.put(message)

    def free_if_busy(self) -> None:
        if self.busy:
            shut_connections()

    # --- the main thread ---

    def serve(self) -> None:
        self.join_group(self.job.store)
        self.tell(("ready", {"pid": os.getpid(), "preloaded": self.preloaded}))
        while True:
            match self.calls.get():
                case Call() as call:
                    self.tell(self.answer(call))
                case ("regroup", store):
                    self.leave_group()
                    self.join_group(store)
                    self.tell(("ready", {"pid": os.getpid(), "preloaded": self.preloaded}))
                case ("exit",):
                    self.leave_group()
                    return

    def join_group(self, store: str) -> None:
        job = self.job
        if job.backend == "nccl":
            torch.cuda.set_device(job.rank)
        dist.init_process_group(
            job.backend,
            store=FileStore(store, job.world_size),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout),
        )

    def leave_group(self) -> None:
        with contextlib.suppress(Exception):  # its connections may be gone already
            dist.destroy_process_group()
        forget_unfinished()
        forget_endpoints()
        forget_threads()

    def answer(self, call: Call) -> Answer:
        sources.remember(call.lines)
        recorder = Recorder() if call.record else None
        result: bytes | None = None
        failure: Report | None = None
        self.busy = True
        try:
            try:
                if recorder is not None:
                    recorder.__enter__()
                value = self.run(call)
                result = self.packed(value)
            finally:
                self.busy = False
                if recorder is not None:
                    recorder.__exit__()
        except BaseException as error:  # a rank survives whatever the learner's code raises
            failure = report(self.job.rank, error, channel.pack)
            # at once: the others may wait for this rank, and are freed by the process that hears of it
            self.tell(("failed", failure))
        flush()
        return Answer(call.number, result, failure, recorder.ranks[0] if recorder is not None else None)

    def run(self, call: Call) -> Any:
        match channel.unpack(call.payload):
            case ("function", function, args, kwargs):
                return function(*args, **kwargs)
            case ("cell", code, number):
                return cells.run(code, number, self.namespace)
            case ("push", names):
                self.namespace.update(names)
                return None
            case ("pull", name):
                return cells.look_up(name, self.namespace)

    def packed(self, value: Any) -> bytes:
        try:
            return channel.pack(value)
        except Exception as error:
            kind = type(value).__name__
            raise TypeError(
                f"a result of type {kind} can't be sent back to the notebook ({error}): "
                "return tensors, numbers, strings, lists or dicts"
            ) from None


def flush() -> None:
    """Write out what print and C code have buffered, before the result is sent."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no C library to ask
        ctypes.CDLL(None).fflush(None)


def end_process_group() -> None:
    """Kill this process and everything that it has started."""
    if hasattr(os, "killpg"):
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _writer(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(job: Job, connection: Connection, output: Connection) -> None:
    """The life of a rank. `output` takes what it writes to stdout and stderr."""
    if hasattr(os, "setsid"):
        os.setsid()
    _die_with_parent()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    sys.stdout, sys.stderr = _writer(1), _writer(2)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[:] = job.path
    os.chdir(job.folder)
    torch.set_num_threads(job.threads)
    set_rank(job.rank)
    configure(network=job.network, rank=job.rank, check=job.check)
    worker = Worker(job, connection, preloaded=os.getpid() != _IMPORTED_BY)

    def on_interrupt(*_: object) -> None:
        if worker.busy:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    threading.Thread(target=worker.listen, name="labkit-listen", daemon=True).start()
    try:
        worker.serve()
    except BaseException as error:
        worker.tell(("broken", report(job.rank, error, channel.pack)))
    flush()
    atexit._run_exitfuncs()
    end_process_group()
