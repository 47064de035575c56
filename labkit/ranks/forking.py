"""Starting the process of a rank, and nothing but that: the caller's `__main__` is never imported in it.

On Linux it is forked from a fork server that has imported torch already, at a tenth of a second for all ranks;
elsewhere it is spawned. The server is our own, apart from multiprocessing's: that one may run already, without torch.
"""

import contextlib
import io
import multiprocessing.process
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import (
    context,
    forkserver,
    get_context,
    popen_forkserver,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.process import BaseProcess
from typing import Any

# every optimizer imports torch._dynamo, which takes as long as torch itself
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "labkit.ranks.entry", "labkit.ranks.fork_server"]

METHOD = "forkserver" if platform.system() == "Linux" else "spawn"

LONGEST_ADDRESS = 107  # bytes of the path of a Unix socket on Linux: unix(7), sun_path without the zero at its end

_patching = threading.Lock()


def new_process(target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Start a process that calls `target(*args)`. It is not daemonic: a DataLoader with workers must run in it."""
    process: BaseProcess
    if METHOD == "forkserver":
        process = _Forked(target=target, args=args, name=name, daemon=False)
        process.start()
    else:
        process = get_context("spawn").Process(target=target, args=args, name=name, daemon=False)
        with _patched(spawn, "get_preparation_data", _prepare):
            process.start()
    # whoever exits would wait for it, a forked child too that has nothing to do with it
    children: Any = multiprocessing.process
    children._children.discard(process)
    return process


def warm_up() -> None:
    """Let the fork server import torch in the background, so that the first ranks start sooner. Returns at once."""
    if METHOD == "forkserver":
        _server.ensure_running()


def forget() -> None:
    """Called in a child that this process has forked: the server is its parent's, not its own."""
    global _server
    if _server._forkserver_alive_fd is not None:
        with contextlib.suppress(OSError):
            os.close(_server._forkserver_alive_fd)
    _server = _Server()


def let_go_of_server() -> None:
    """Called in a rank: close its part of the line that tells the server that it is still needed. So the server ends
    with the process that uses it, whatever the ranks do."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


class _Server(forkserver.ForkServer):
    """The fork server, in a session of its own: who stops or kills a kernel, or closes a terminal, does so to a whole
    process group, and the server has work to do after that."""

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(PRELOAD)

    def ensure_running(self) -> None:
        refuse_long_folder(util.get_temp_dir())
        resource_tracker.ensure_running()
        with _patched(util, "spawnv_passfds", _spawn):
            super().ensure_running()


def refuse_long_folder(folder: str) -> None:
    """RuntimeError where a socket in this folder for temporary files would have too long a path."""
    if (letters := len(os.fsencode(f"{folder}/listener-12345678"))) > LONGEST_ADDRESS:
        raise RuntimeError(
            f"ranks can't start: the path of a socket in {folder} would have {letters} letters, and {LONGEST_ADDRESS} "
            "is the most: set the environment variable TMPDIR to a folder with a shorter name, such as /tmp"
        )


def _spawn(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
    process = subprocess.Popen(
        arguments, executable=path, pass_fds=descriptors, start_new_session=True, stdin=subprocess.DEVNULL
    )
    process.returncode = 0  # its end is no business of this object's
    return process.pid


_server: Any = _Server()


class _Popen(popen_forkserver.Popen):
    """Asks our server for a process, and sends it what to run."""

    _fds: list[int]

    def _launch(self, process: BaseProcess) -> None:
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            # what multiprocessing would prepare (path, arguments, above all __main__) is no business of a rank
            reduction.dump({}, buffer)
            reduction.dump(process, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, data = _server.connect_to_new_process(self._fds)
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))
        with open(data, "wb") as stream:
            stream.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Forked(context.ForkServerProcess):
    # what the rank itself starts its processes by: else the workers of a DataLoader would come from a server of their
    # own, which imports torch again and can't take a Dataset that is defined in a notebook
    _start_method = "fork"

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:
        return _Popen(process)


_prepared = spawn.get_preparation_data


def _prepare(name: str) -> dict[str, Any]:
    """What multiprocessing tells a spawned process, without the caller's script, which it would run in every rank."""
    return {key: value for key, value in _prepared(name).items() if not key.startswith("init_main")}


@contextmanager
def _patched(module: Any, name: str, value: object) -> Iterator[None]:
    """Replace a name in a module of Python's for a moment."""
    with _patching:
        before = getattr(module, name)
        setattr(module, name, value)
        try:
            yield
        finally:
            setattr(module, name, before)
