"""A rank at work: its main thread runs functions and cells, and another thread listens while they run.

The listening thread answers "where are you?", delivers interrupts, frees a main thread that waits in vain, and, when
the process that started the ranks is gone, ends this process and all that it has started.
"""

import os
import queue
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from labkit.ranks import cells, channel, grouping, sources, stores, whereabouts
from labkit.ranks.ending import end_myself
from labkit.ranks.jobs import Answer, Call, Job, Lines, Ready, Regroup
from labkit.ranks.reports import Report, report
from labkit.ranks.sockets import shut_connections
from labkit.ranks.streams import Streams
from labkit.record import Recorder

STOP = (0.05, 0.25)  # seconds between two signals, and until an interrupted rank's connections are shut


_here: "Worker | None" = None


def is_rank() -> bool:
    """Whether this process is a rank that `Ranks` has started, or was forked from one."""
    return _here is not None


class Worker:
    """The state of a rank between calls."""

    def __init__(self, job: Job, connection: Connection, streams: Streams, *, preloaded: bool) -> None:
        global _here
        _here = self
        self.job, self.connection, self.streams, self.preloaded = job, connection, streams, preloaded
        self.calls: queue.Queue[tuple[Any, bytes]] = queue.Queue()
        self.busy = False
        self.limit = job.timeout
        self.number = 0  # of the call that it works on
        self.interrupted = 0  # the last call in which KeyboardInterrupt was raised
        self.cancelled = 0  # the last call that was interrupted before it began
        self.lock = threading.Lock()
        self.namespace = cells.new_namespace(job.rank, job.world_size)

    def tell(self, message: Any, load: bytes | None = None) -> None:
        with self.lock:
            channel.send(self.connection, message, load)

    # --- the listening thread ---

    def listen(self) -> None:
        try:
            while True:
                self.hear(*channel.receive(self.connection))
        finally:
            # the process that started us is gone without a word
            stores.remove(self.job.stores)
            end_myself()

    def hear(self, message: Any, load: bytes) -> None:
        match message:
            case ("where", with_stack):
                self.tell(whereabouts.of_main_thread(self.busy, with_stack=with_stack))
            case ("clock",):
                self.tell(("clock", time.perf_counter()))
            case "free":
                shut_connections()
            case ("interrupt", number):
                self.interrupt(number)
            case Lines():
                sources.remember(channel.unpack(load))
            case _:
                self.calls.put((message, load))

    def interrupt(self, number: int) -> None:
        with self.lock:
            if not self.busy:
                self.cancelled = number  # it is still to come
                return
        threading.Thread(target=self.stop, args=(number,), name="labkit-stop", daemon=True).start()

    def stop(self, number: int) -> None:
        """Let the main thread raise KeyboardInterrupt, wherever it is."""
        for seconds in STOP:
            # to the thread that may sleep: a signal to the process could be taken by another; and once more, since
            # it may have come a moment before the sleep
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(seconds)
            if not self.busy or self.number != number:
                return
        # a rank blocked inside gloo hears of it only when its wait ends
        shut_connections()

    def on_interrupt(self, *_: object) -> None:
        """The signal handler."""
        if self.busy and self.interrupted < self.number:
            self.interrupted = self.number
            raise KeyboardInterrupt

    # --- the main thread ---

    def serve(self) -> None:
        grouping.join(self.job, 1)
        self.tell(Ready(os.getpid(), self.preloaded))
        while True:
            match self.calls.get():
                case Call() as call, load:
                    self.answer(call, load)
                case Regroup(number), _:
                    grouping.leave()
                    grouping.join(self.job, number)
                    self.limit = self.job.timeout
                    self.tell(Ready(os.getpid(), self.preloaded))
                case "exit", _:
                    grouping.leave()
                    return

    def answer(self, call: Call, load: bytes) -> None:
        recorder = Recorder() if call.record else None
        result: bytes | None = None
        failure: Report | None = None
        if call.timeout != self.limit:
            grouping.limit_waits(call.timeout)
            self.limit = call.timeout
        try:
            with self.lock:
                self.number, self.busy = call.number, True
            if call.number <= self.cancelled:
                raise KeyboardInterrupt
            if recorder is not None:
                recorder.__enter__()
            result = self.packed(self.run(load))
            self.busy = False
        except BaseException as error:  # a rank survives whatever the learner's code raises
            self.busy = False
            failure = report(self.job.rank, error, channel.pack)
            # at once: the others may wait for this rank, and are freed by the process that hears of it
            self.tell(failure)
        if recorder is not None:
            recorder.__exit__()
        self.streams.flush()
        self.streams.restore()
        record = recorder.ranks[0] if recorder is not None else None
        self.tell(Answer(call.number, failure, record, dist.is_initialized()), result)

    def run(self, load: bytes) -> Any:
        match self.unpacked(load):
            case "function", function, args, kwargs:
                return function(*args, **kwargs)
            case "cell", code, number:
                return cells.run(code, number, self.namespace)
            case "push", names:
                self.namespace.update(names)
                return None
            case "pull", name:
                return cells.look_up(name, self.namespace)

    def unpacked(self, load: bytes) -> Any:
        try:
            return channel.unpack(load)
        except Exception as error:
            raise TypeError(
                f"the function or an argument can't be rebuilt on the ranks ({type(error).__name__}: {error}): "
                "send tensors, numbers, strings, lists or dicts"
            ) from error

    def packed(self, value: Any) -> bytes:
        try:
            return channel.pack(value)
        except Exception as error:
            kind = type(value).__name__
            raise channel.Unsendable(
                f"a result of type {kind} can't be sent back to the notebook ({error}): "
                "return tensors, numbers, strings, lists or dicts"
            ) from None
