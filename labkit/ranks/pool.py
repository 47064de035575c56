"""`Ranks`: a set of rank processes that stay, and run one thing after the other."""

import atexit
import html
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

import psutil

from labkit.collectives.network import Network
from labkit.ranks import channel, errors, forking, interrupts, sources, stores
from labkit.ranks.arguments import check_arguments, check_chosen, check_timeout
from labkit.ranks.calling import Calling, Outcome
from labkit.ranks.jobs import Call, Job, Lines
from labkit.ranks.output import Output, is_live
from labkit.ranks.team import Team
from labkit.record import RankRecord, recorders

START_LIMIT = 120.0  # seconds for all ranks to be ready

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

    # what a failed __init__, and a child that this process forks, leave behind
    _team: Team | None = None

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
        check_arguments(world_size, backend, timeout, network, threads)
        self.world_size, self.backend, self.timeout = int(world_size), backend, timeout
        self.network, self.threads, self.check = network, threads, check
        self._lock = threading.Lock()  # held during a call
        self._closing = False
        self._number = 0
        self._cells = 0
        self._must_regroup = False
        _pools.add(self)

    # --- life ---

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._team is not None and not sys.is_finalizing():
            self.close()

    def start(self) -> None:
        """Start the ranks now rather than at the first call. Nothing happens if they run."""
        __tracebackhide__ = True
        with self._work(), interrupts.held_back() as pressed:
            self._ready_team(pressed)
        if pressed.pressed:
            raise KeyboardInterrupt

    def restart(self) -> None:
        """End the ranks and start new ones: what they held is gone."""
        self.close()
        self.start()

    def close(self) -> None:
        """End the ranks; a call under way in another thread ends with a RankError. The next call starts new ones."""
        team = self._team
        if team is None:
            return
        if not self._lock.acquire(blocking=False):
            self._closing = True
            team.strike()
            return
        try:
            with interrupts.held_back() as pressed:
                self._team = None
                team.leave()
        finally:
            self._lock.release()
        if pressed.pressed:
            raise KeyboardInterrupt

    @contextmanager
    def _work(self) -> Iterator[None]:
        """They do one thing at a time."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("these ranks are busy with another call: wait for it, or use other ranks")
        self._closing = False
        try:
            yield
        finally:
            self._lock.release()

    def _ready_team(self, pressed: interrupts.Interrupts) -> Team:
        """The ranks, running, with a group that can be used."""
        if self._team is None:
            folder = stores.new_folder()
            self._must_regroup = False
            self._team = Team([self._job(rank, folder) for rank in range(self.world_size)], pressed)
        elif self._must_regroup:
            try:
                self._team.regroup(pressed)
            except BaseException:
                self._kill()
                raise
            self._must_regroup = False
        return self._team

    def _kill(self) -> None:
        team, self._team = self._team, None
        if team is not None:
            team.kill()

    def _job(self, rank: int, folder: str) -> Job:
        size, threads = str(self.world_size), str(self.threads)
        environment = dict(os.environ)
        environment.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        environment.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, TOKENIZERS_PARALLELISM="false")
        loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
        if loopback:
            environment["GLOO_SOCKET_IFNAME"] = loopback
        return Job(
            rank, self.world_size, self.backend, self.timeout, START_LIMIT, self.threads, folder, self.network,
            self.check, environment, [entry or os.getcwd() for entry in sys.path], os.getcwd(),
        )  # fmt: skip

    # --- calls ---

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; returns what each returned, in rank order.

        The function may be defined in the notebook. Tensors come back as CPU copies. Raises RankError where a rank
        fails, and TypeError where the function or an argument can't be sent.
        """
        __tracebackhide__ = True  # a learner's traceback ends with the learner's own line
        if not callable(cast(Any, function)):
            kind = type(function).__name__
            raise TypeError(f"ranks.run: give a function and its arguments, not a {kind} (call it without parentheses)")
        return self._call(("function", function, args, kwargs))

    def run_cell(self, code: str, *, on: Sequence[int] | None = None, timeout: float | None = None) -> list[str | None]:
        """Execute source on every rank (or those in `on`), in names that persist; returns the repr of the last
        expression of each rank. `timeout` replaces the ranks' own for this cell. This is what %%ranks calls."""
        __tracebackhide__ = True
        self._cells += 1
        return self._call(("cell", code, self._cells), on, timeout)

    def push(self, **names: Any) -> None:
        """Set names on every rank, for the %%ranks cells that follow."""
        __tracebackhide__ = True
        self._call(("push", names))

    def pull(self, name: str) -> list[Any]:
        """The value that a name has in each rank's %%ranks cells, in rank order."""
        __tracebackhide__ = True
        return self._call(("pull", name))

    def _call(self, what: Any, on: Sequence[int] | None = None, timeout: float | None = None) -> list[Any]:
        __tracebackhide__ = True
        chosen = list(range(self.world_size)) if on is None else check_chosen(on, self.world_size)
        limit = self.timeout if timeout is None else check_timeout(timeout)
        try:
            load = channel.pack(what)
        except Exception as error:
            raise TypeError(f"the function or an argument can't be sent to the ranks: {error}") from None
        with self._work():
            with interrupts.held_back() as pressed:
                outcome = self._follow(load, chosen, limit, pressed)
            if pressed.pressed:
                raise KeyboardInterrupt
            if outcome.error is not None:
                raise outcome.error
        return [self._result(rank, outcome.results[rank]) for rank in chosen]

    def _follow(self, load: bytes, chosen: list[int], limit: float, pressed: interrupts.Interrupts) -> Outcome:
        team = self._ready_team(pressed)
        self._number += 1
        open_recorders = recorders()
        output = Output(self.world_size, live=is_live())
        try:
            if lines := sources.cell_sources(team.known):
                for member in team.members:
                    member.tell(Lines(), channel.pack(lines))
            for rank in chosen:
                team.members[rank].tell(Call(self._number, bool(open_recorders), limit), load)
            outcome = Calling(team, self._number, chosen, output, limit, pressed).run()
        except BaseException:
            self._kill()
            raise
        for recorder in open_recorders:
            recorder.network = str(self.network) if self.network else None
            for rank, member in enumerate(team.members):
                answer = outcome.answers.get(rank)
                seen = answer.record if answer and answer.record else RankRecord(rank)
                recorder.merge(rank, seen, offset=member.offset)
        self._must_regroup = self._must_regroup or outcome.must_regroup
        if outcome.must_kill:
            self._kill()
        if self._closing:
            self._kill()
            outcome.error = errors.of_closing(self.world_size)
        return outcome

    def _result(self, rank: int, result: bytes) -> Any:
        try:
            return channel.unpack(result)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise errors.of_result(rank, reason) from error

    # --- looks ---

    @property
    def preloaded(self) -> list[bool]:
        """For each rank whether torch was there when it started, rather than imported by it."""
        return [member.preloaded for member in self._team.members] if self._team else []

    def __repr__(self) -> str:
        network = f", network=({self.network})" if self.network else ""
        state = "running" if self._team else "not started"
        return f"Ranks({self.world_size}, backend={self.backend!r}{network}): {state}"

    def _repr_html_(self) -> str:
        rows = []
        for rank in range(self.world_size):
            state, memory = "not started", ""
            if self._team is not None:
                try:
                    process = psutil.Process(self._team.members[rank].pid)
                    # its own: most of what it shows is shared with the process that it was forked from
                    memory = f"{process.memory_full_info().uss / 1e6:.0f} MB"
                    state = "busy" if self._lock.locked() else "idle"
                except psutil.Error:
                    state = "gone"
            rows.append(f"<tr><td>rank {rank}</td><td>{state}</td><td>{memory}</td></tr>")
        head = "<tr><th>rank</th><th>state</th><th>memory</th></tr>"
        return f"<p>{html.escape(repr(self))}</p><table>{head}{''.join(rows)}</table>"


def launch(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Start ranks, call `function(*args, **kwargs)` on each, end them; returns the results in rank order."""
    with Ranks(world_size) as ranks:
        return ranks.run(function, *args, **kwargs)


@atexit.register
def _close_all() -> None:
    """At the end of this process."""
    for pool in list(_pools):
        pool.close()


def _forget_all() -> None:
    """In a child that this process forks: the ranks are its parent's. So the parent's end is noticed, too: the child
    holds no line to them."""
    for pool in list(_pools):
        team, pool._team, pool._lock, pool._closing = pool._team, None, threading.Lock(), False
        if team is not None:
            team.abandon()
    forking.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
