"""Who fetches, and who waits: one process a set by a file lock, one rank a job by a claim beside the lock.

The lock is the kernel's (flock, or msvcrt on Windows, by `filelock`), so it is gone when its process is. The claim is a
small file that rank 0 writes while it holds the lock; the other ranks read it, so that they end with its error, or
notice that it died. They look every 0.2 seconds and take part in no collective, so no deadlock timeout applies.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch.distributed as dist
from filelock import FileLock, Timeout

from labkit.data.errors import DataError

_POLL = 0.2  # seconds between two looks


def local_rank() -> int:
    """This process's rank on its machine: LOCAL_RANK, else RANK, else that of the process group, else 0."""
    for variable in ("LOCAL_RANK", "RANK"):
        if (value := os.environ.get(variable, "")).isdecimal():
            return int(value)
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def current_job() -> str:
    """What the ranks of one job on one machine have in common: the process that started them, and its rendezvous."""
    rendezvous = [os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    return "-".join([socket.gethostname(), str(os.getppid()), *rendezvous])


@dataclass(frozen=True)
class Turn:
    """The turn of `job` to fetch the set `name`; lock and claims lie in `folder`."""

    folder: Path
    name: str
    job: str

    @contextmanager
    def lead(self, notice: Callable[[str], None]) -> Iterator[None]:
        """Rank 0's part: wait for the lock, claim, do the body. An error in it is left for the other ranks to read."""
        lock = self._lock()
        try:
            lock.acquire(timeout=1.0)
        except Timeout:
            notice(f"Another process is fetching {self.name}; waiting for it.")
            lock.acquire()
        try:
            self._claim("")
            yield
        except BaseException as error:
            with suppress(OSError):  # a full disk may have no room for this either
                self._claim(self._sentence(error))
            raise
        else:
            for claim in self.folder.glob(f"{self.name}.*.json"):
                claim.unlink(missing_ok=True)
        finally:
            lock.release()

    def follow(self, done: Callable[[], bool], *, start_timeout: float, settle: float) -> None:
        """The other ranks' part: return once `done()`, however long it takes while somebody holds the lock.

        Raises `DataError` with rank 0's sentence when it failed, says so when it died, and when for `start_timeout`
        seconds nobody has begun. A claim from before this call, unless its rank 0 was seen alive, may be that of an
        earlier, failed try of the same job, about to be replaced: it counts only after `settle` seconds.
        """
        lock, current, idle_since = self._lock(), time.time(), time.monotonic()
        while not done():
            claim = self._read_claim()
            if claim and not claim.sentence and psutil.pid_exists(claim.pid):
                current = min(current, claim.time)
            try:
                with lock.acquire(blocking=False):
                    if done():
                        return
                    claim = self._read_claim()
            except Timeout:
                idle_since = time.monotonic()
            else:
                idle = time.monotonic() - idle_since
                if claim and (claim.time >= current or idle > settle):
                    raise DataError(claim.sentence or f"Rank 0 died while it fetched {self.name}; start the job again.")
                if not claim and idle > start_timeout:
                    raise DataError(
                        f"Rank 0 has not begun to fetch {self.name} within {start_timeout:.0f} s. Every rank of the "
                        f"job must call fetch, or fetch it beforehand: labkit data fetch {self.name}."
                    )
            time.sleep(_POLL)

    def _lock(self) -> FileLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / f"{self.name}.lock")

    def _claim_file(self) -> Path:
        plain = "".join(letter if letter.isalnum() else "-" for letter in self.job)
        return self.folder / f"{self.name}.{plain}.json"

    def _claim(self, sentence: str) -> None:
        path = self._claim_file()
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"pid": os.getpid(), "time": time.time(), "sentence": sentence}), encoding="utf-8")
        new.replace(path)

    def _read_claim(self) -> "_Claim | None":
        try:
            content = json.loads(self._claim_file().read_text(encoding="utf-8"))
            return _Claim(int(content["pid"]), float(content["time"]), str(content["sentence"]))
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _sentence(self, error: BaseException) -> str:
        if isinstance(error, DataError):
            return str(error)
        if isinstance(error, KeyboardInterrupt):
            return f"Rank 0 was interrupted while it fetched {self.name}; what came so far is kept."
        return f"Rank 0 failed while it fetched {self.name}: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Claim:
    pid: int
    time: float
    sentence: str  # empty while rank 0 is at it
