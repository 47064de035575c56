"""`Ranks`: a set of rank processes that stay, and run one thing after the other."""

import atexit
import html
import os
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import psutil
import torch

from labkit.collectives.network import Network
from labkit.ranks import channel, errors, sources
from labkit.ranks.calling import Calling, Outcome
from labkit.ranks.output import Output, is_live
from labkit.ranks.processes import Member, Stores, start
from labkit.ranks.worker import Answer, Call, Job
from labkit.record import measure_offset, recorders

START_LIMIT = 120  # seconds for all ranks to be ready
MOST = 64

_pools: "weakref.WeakSet[Ranks]" = weakref.WeakSet()


class Ranks:
    """N rank processes on this machine, with torch.distributed initialised in each.

    They start at the first call and keep what they hold until `close()`, `restart()` or the end of this process.

    Args:
        world_size: how many ranks, 1 to 64.
        backend: "gloo" (ranks compute on the CPU) or "nccl" (one GPU for every rank).
        timeout: seconds that one wait may last without progress. A call may last as long as it likes.
        network: a `labkit.collectives.Network` to emulate, None for the machine's own speed.
        threads: torch threads in each rank.
        check: whether shapes and dtypes are exchanged before each message.

    Errors on the ranks are raised as `RankError`.
    """

    def __init__(
        self,
        world_size: int,
        backend: str = "gloo",
        timeout: float = 60,
        network: Network | None = None,
        *,
        threads: int = 1,
        check: bool = True,
    ) -> None:
        _refuse_bad(world_size, backend, timeout, network, threads)
        self.world_size, self.backend, self.timeout = world_size, backend, timeout
        self.network, self.threads, self.check = network, threads, check
        self._members: list[Member] = []
        self._stores: Stores | None = None
        self._number = 0
        self._cells = 0
        self._regroup = False
        self._running = False
        self._known: set[str] = set()
        _pools.add(self)

    # --- life ---

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def start(self) -> None:
        """Start the ranks now rather than at the first call. Nothing happens if they run."""
        if self._members:
            return
        self._stores = Stores()
        store = self._stores.new()
        self._known.clear()
        self._regroup = False
        try:
            for rank in range(self.world_size):
                self._members.append(start(self._job(rank, store)))
            self._await_ready()
            for member in self._members:
                member.offset, _ = measure_offset(partial(self._read_clock, member))
        except BaseException:
            self._kill()
            raise

    def restart(self) -> None:
        """End the ranks and start new ones: what they held is gone."""
        self.close()
        self.start()

    def close(self) -> None:
        """End the ranks. The next call starts new ones."""
        for member in self._members:
            member.tell(("exit",))
        end = time.perf_counter() + 2
        for member in self._members:
            member.process.join(max(0.0, end - time.perf_counter()))
        self._kill()

    def _kill(self) -> None:
        for member in self._members:
            member.kill()
        for member in self._members:
            member.release()
        self._members = []
        if self._stores is not None:
            self._stores.remove()
            self._stores = None

    def _job(self, rank: int, store: str) -> Job:
        size, threads = str(self.world_size), str(self.threads)
        environment = dict(os.environ)
        environment.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        environment.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, TOKENIZERS_PARALLELISM="false")
        loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
        if loopback:
            environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        return Job(
            rank, self.world_size, self.backend, self.timeout, self.threads, store, self.network, self.check,
            environment, [entry or os.getcwd() for entry in sys.path], os.getcwd(),
        )  # fmt: skip

    def _await_ready(self) -> None:
        end = time.perf_counter() + START_LIMIT
        for member in self._members:
            try:
                if not member.connection.poll(max(0.0, end - time.perf_counter())):
                    raise errors.of_start(member.rank, f"not ready after {START_LIMIT} s")
                message = channel.unpack(member.connection.recv_bytes())
            except (EOFError, OSError):
                member.process.join(1)
                words = member.read_output().decode(errors="replace").strip().splitlines()
                reason = words[-1] if words else f"it ended with exit code {member.process.exitcode}"
                raise errors.of_start(member.rank, reason) from None
            match message:
                case ("ready", {"pid": pid, "preloaded": preloaded}):
                    member.pid, member.preloaded = pid, preloaded
                case ("broken", reason):
                    raise errors.of_start(member.rank, reason)

    def _read_clock(self, member: Member) -> float:
        member.tell(("clock",))
        while True:
            match channel.unpack(member.connection.recv_bytes()):
                case ("clock", moment):
                    return float(moment)

    # --- calls ---

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; returns what each returned, in rank order.

        The function may be defined in the notebook. Tensors come back as CPU copies. Raises RankError where a rank
        fails, and TypeError where the function or an argument can't be sent.
        """
        if not callable(cast(Any, function)):
            kind = type(function).__name__
            raise TypeError(f"ranks.run: give a function and its arguments, not a {kind} (call it without parentheses)")
        return self._call(("function", function, args, kwargs))

    def run_cell(self, code: str, *, on: list[int] | None = None) -> list[str | None]:
        """Execute source on every rank (or those in `on`), in names that persist; returns the repr of the last
        expression of each rank. This is what the %%ranks magic calls."""
        self._cells += 1
        return self._call(("cell", code, self._cells), on=on)

    def push(self, **names: Any) -> None:
        """Set names on every rank, for the %%ranks cells that follow."""
        self._call(("push", names))

    def pull(self, name: str) -> list[Any]:
        """The value that a name has in each rank's %%ranks cells, in rank order."""
        return self._call(("pull", name))

    def _call(self, what: tuple[Any, ...], on: list[int] | None = None) -> list[Any]:
        if self._running:
            raise RuntimeError("these ranks are busy with another call: wait for it, or use other ranks")
        try:
            payload = channel.pack(what)
        except Exception as error:
            raise TypeError(f"the function or an argument can't be sent to the ranks: {error}") from None
        chosen = list(range(self.world_size)) if on is None else on
        self._running = True
        try:
            self.start()
            self._rejoin()
            outcome = self._follow(payload, chosen)
        finally:
            self._running = False
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.error is not None:
            raise outcome.error
        return [self._result(outcome.answers[rank]) for rank in chosen]

    def _follow(self, payload: bytes, chosen: list[int]) -> Outcome:
        self._number += 1
        lines = sources.cell_sources(self._known)
        open_recorders = recorders()
        for rank in chosen:
            self._members[rank].tell(Call(self._number, payload, bool(open_recorders), lines))
        output = Output(self.world_size, live=is_live())
        calling = Calling(self._members, self._number, output, timeout=self.timeout)
        calling.pending &= set(chosen)
        outcome = calling.run()
        for rank, answer in sorted(outcome.answers.items()):
            if answer.record is not None:
                for recorder in open_recorders:
                    recorder.merge(rank, answer.record, offset=self._members[rank].offset)
                    recorder.network = str(self.network) if self.network else None
        self._regroup = outcome.must_regroup
        if outcome.must_kill:
            self._kill()
        return outcome

    def _rejoin(self) -> None:
        """Build the group anew after a failure."""
        if not self._regroup:
            return
        assert self._stores is not None
        store = self._stores.new()
        for member in self._members:
            member.tell(("regroup", store))
        self._await_ready()
        self._regroup = False

    def _result(self, answer: Answer) -> Any:
        assert answer.result is not None
        return channel.unpack(answer.result)

    # --- looks ---

    @property
    def preloaded(self) -> list[bool]:
        """For each rank whether torch was there when it started, rather than imported by it."""
        return [member.preloaded for member in self._members]

    def __repr__(self) -> str:
        network = f", network=({self.network})" if self.network else ""
        state = "running" if self._members else "not started"
        return f"Ranks({self.world_size}, backend={self.backend!r}{network}): {state}"

    def _repr_html_(self) -> str:
        rows = []
        for rank in range(self.world_size):
            state, memory = "not started", ""
            if self._members:
                try:
                    process = psutil.Process(self._members[rank].pid)
                    state = "busy" if self._running else "idle"
                    memory = f"{process.memory_info().rss / 1e6:.0f} MB"
                except psutil.Error:
                    state = "gone"
            rows.append(f"<tr><td>rank {rank}</td><td>{state}</td><td>{memory}</td></tr>")
        head = "<tr><th>rank</th><th>state</th><th>memory</th></tr>"
        return f"<p>{html.escape(repr(self))}</p><table>{head}{''.join(rows)}</table>"


def launch(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Start ranks, call `function(*args, **kwargs)` on each, end them; returns the results in rank order."""
    with Ranks(world_size) as ranks:
        return ranks.run(function, *args, **kwargs)


def _refuse_bad(world_size: Any, backend: Any, timeout: Any, network: Any, threads: Any) -> None:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or not 1 <= world_size <= MOST:
        raise ValueError(f"Ranks: world_size is {world_size!r}; give a whole number of ranks from 1 to {MOST}")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"Ranks: backend is {backend!r}; give 'gloo' (CPU) or 'nccl' (a GPU for every rank)")
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        found = torch.cuda.device_count()
        raise ValueError(
            f"Ranks: backend 'nccl' needs a GPU for each of the {world_size} ranks and this machine has {found}: "
            "use backend='gloo', or fewer ranks"
        )
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"Ranks: timeout is {timeout!r}; give seconds above 0")
    if network is not None and not isinstance(network, Network):
        raise TypeError(f"Ranks: network is a {type(network).__name__}; give a labkit.collectives.Network or None")
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"Ranks: threads is {threads!r}; give the torch threads of each rank, 1 or more")


@atexit.register
def _close_all() -> None:
    """Registered after multiprocessing's own exit function, so that it runs before: that one waits for processes."""
    for pool in list(_pools):
        pool.close()
