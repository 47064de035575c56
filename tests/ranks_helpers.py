"""What the tests of ranks share: other Python processes, kernels, and the proof that nothing is left of them."""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from labkit import collectives
from labkit.ranks import RankError, Ranks

GUARD = 60.0  # seconds after which a test gives up waiting
_MARK = "LABKIT_TEST_OF_RANKS"


def wait_until(true: Callable[[], Any], what: str, seconds: float = GUARD) -> Any:
    """Wait for something that has to come; returns it."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"waited {seconds} s in vain until {what}"
        time.sleep(0.02)
    return found


@dataclass
class Scene:
    """A folder for temporary files, and a mark in the environment that every process started in it inherits."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.folder), _MARK: self.mark}

    def processes(self) -> list[psutil.Process]:
        """Those of the scene that run, however they have detached themselves."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # it ended meanwhile, or is none of ours
        return found

    def files(self) -> list[str]:
        """What lies in the folder, torch's own cache apart."""
        return [one.name for one in self.folder.iterdir() if not one.name.startswith("torchinductor")]

    def wait_until_empty(self) -> None:
        """Wait until nothing runs and no file or folder is left."""
        try:
            wait_until(lambda: not self.processes() and not self.files(), "nothing is left")
        except AssertionError:
            left = [" ".join(process.cmdline())[:100] for process in self.processes()], self.files()
            raise AssertionError(f"something is left: {left}") from None

    def script(
        self, code: str, *arguments: str, command: Sequence[str] = (), **options: Any
    ) -> "subprocess.Popen[str]":
        """Start Python on this code, in a file as a learner has it; `command` goes before it."""
        file = self.folder.parent / f"script-{uuid.uuid4().hex[:6]}.py"
        file.write_text(textwrap.dedent(code))
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL} | options
        whole = [*command, sys.executable, str(file), *arguments]
        return subprocess.Popen(whole, env=self.environment, text=True, start_new_session=True, **options)

    def run_script(self, code: str, *arguments: str) -> str:
        """Run Python on this code to its end; returns what it wrote."""
        process = self.script(code, *arguments)
        written, _ = process.communicate(timeout=GUARD)
        assert process.returncode == 0, written
        return written


@contextmanager
def scene() -> Iterator[Scene]:
    """A scene of its own; what is left of it at the end is removed, so that one failure does not lead to others."""
    # pytest's own folders have long names, and the path of a socket may have hundred letters only
    with tempfile.TemporaryDirectory(prefix="scene-", ignore_cleanup_errors=True) as short:
        folder = Path(short) / "t"
        folder.mkdir()
        one = Scene(folder)
        try:
            yield one
        finally:
            for process in one.processes():
                process.kill()


@dataclass
class Cell:
    """What came of a cell: the text printed and shown, the pieces of it as they came, and the error if any."""

    text: str = ""
    pieces: list[str] = field(default_factory=list)
    error: str = ""
    message: str = ""
    traceback: str = ""


class Kernel:
    """A notebook's kernel, driven as Jupyter does it."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, when: str = "", then: Callable[[], None] | None = None) -> Cell:
        """Execute a cell; `then` is called as soon as `when` appears in its output."""
        cell, request = Cell(), self.client.execute(textwrap.dedent(code).strip())
        end = time.monotonic() + GUARD
        while time.monotonic() < end:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                cell.pieces.append(content["text"])
            elif kind == "execute_result":
                cell.pieces.append(content["data"]["text/plain"] + "\n")
            elif kind == "error":
                cell.error, cell.message = content["ename"], content["evalue"]
                cell.traceback = "\n".join(content["traceback"])
            cell.text = "".join(cell.pieces)
            if then is not None and when in cell.text:
                now, then = then, None
                now()
            if kind == "status" and content["execution_state"] == "idle":
                return cell
        raise AssertionError(f"this cell did not end: {code}\n{cell}")

    def ok(self, code: str) -> str:
        """Execute a cell that must succeed; returns its text."""
        cell = self.run(code)
        assert not cell.error, cell.traceback
        return cell.text

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def kill(self) -> None:
        """As Jupyter does it: SIGKILL to the kernel's process group."""
        self.manager.signal_kernel(signal.SIGKILL)


@contextmanager
def kernel(scene: Scene, **environment: str) -> Iterator[Kernel]:
    """A kernel in a scene, with labkit loaded. With JPY_SESSION_NAME it is one of JupyterLab."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**scene.environment, **environment})
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=GUARD)
        one = Kernel(manager, client)
        one.ok("%load_ext labkit\nfrom labkit.ranks import RankError, Ranks, launch\nimport torch.distributed as dist")
        yield one
    finally:
        client.stop_channels()
        if manager.is_alive():
            manager.shutdown_kernel(now=False)


# --- questions to ranks ---


def remembers(ranks: Ranks) -> bool:
    """Whether the ranks still hold what they held when the test began."""
    try:
        return ranks.pull("memory") == ["kept"] * ranks.world_size
    except RankError as error:
        assert error.type == "NameError"
        return False


def are_freed(ranks: Ranks, error: RankError) -> bool:
    """Whether the others stopped by themselves after a failure: else they would have been killed after 2 s."""
    return error.kind == "exception" and remembers(ranks)


def they_work(ranks: Ranks) -> bool:
    """Whether the ranks can talk to each other."""

    def add_up() -> float:
        ones = torch.ones(1)
        collectives.all_reduce(ones)
        return ones.item()

    return ranks.run(add_up) == [ranks.world_size] * ranks.world_size


def failure(ranks: Ranks, function: Any, *arguments: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        ranks.run(function, *arguments)
    assert "\n" not in str(caught.value)
    return caught.value


def others(ranks: Ranks, but: int) -> str:
    """The other ranks as errors name them."""
    named = [rank for rank in range(ranks.world_size) if rank != but]
    if len(named) == 1:
        return f"rank {named[0]}"
    return f"ranks {named[0]}-{named[-1]}" if named == list(range(named[0], named[-1] + 1)) else "ranks 0, 2 and 3"
