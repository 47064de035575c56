"""The processes of one set of ranks, from their common start to their common end."""

import contextlib
import time
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from labkit.ranks import channel, errors, stores
from labkit.ranks.interrupts import Interrupts
from labkit.ranks.jobs import Job, Ready, Regroup
from labkit.ranks.processes import Member
from labkit.ranks.reports import Report
from labkit.record import measure_offset

LEAVE = 2.0  # seconds that ranks have to end by themselves


class Team:
    """Ranks that run. Raises RankError where they can't start, KeyboardInterrupt where that is interrupted."""

    def __init__(self, jobs: list[Job], interrupts: Interrupts) -> None:
        self.jobs, self.folder, self.groups = jobs, jobs[0].stores, 1
        self.known: set[str] = set()  # the notebook cells whose source they have
        self.members: list[Member] = []
        try:
            for job in jobs:
                self.members.append(Member(job))
            self._await_ready(interrupts)
            for member in self.members:
                offset, error = measure_offset(partial(self._read_clock, member))
                # processes of one machine share a clock, mostly: what the measurement can't tell from 0 is 0
                member.offset = offset if abs(offset) > error else 0.0
        except BaseException:
            self.kill()
            raise

    def tell_all(self, message: Any) -> None:
        for member in self.members:
            member.tell(message)

    def regroup(self, interrupts: Interrupts) -> None:
        """Let the ranks leave their group and build a new one."""
        self.groups += 1
        self.tell_all(Regroup(self.groups))
        self._await_ready(interrupts)

    def leave(self) -> None:
        """End the ranks: let them end by themselves, then kill what is left of them and of what they have started."""
        self.tell_all("exit")
        end = time.perf_counter() + LEAVE
        running: dict[Any, Member] = {member.process.sentinel: member for member in self.members}
        while running and (rest := end - time.perf_counter()) > 0:
            # what they write has to go somewhere, or they would never end
            outputs: dict[Any, Member] = {member.output: member for member in running.values()}
            for one in wait([*running, *outputs], min(rest, 0.1)):
                if one in outputs:
                    outputs[one].read_output()
                else:
                    del running[one]
        self.kill()

    def strike(self) -> None:
        """End the ranks at once, with all that they have started; whoever follows them will notice."""
        for member in self.members:
            member.kill()
        stores.remove(self.folder)

    def kill(self) -> None:
        """End the ranks at once, and wait until they are gone."""
        self.strike()
        for member in self.members:
            member.release()
        stores.remove(self.folder)

    def abandon(self) -> None:
        """Called in a child that this process has forked: the ranks are its parent's."""
        for member in self.members:
            member.abandon()

    def _await_ready(self, interrupts: Interrupts) -> None:
        limit = self.jobs[0].start_limit
        end = time.perf_counter() + limit
        waiting = {member.connection: member for member in self.members}
        outputs = {member.output: member for member in self.members}
        while waiting:
            rest = end - time.perf_counter()
            if rest <= 0:
                raise errors.of_start(min(one.rank for one in waiting.values()), f"not ready after {limit:g} s")
            ready = wait([interrupts.bell, *waiting, *outputs], rest)
            if interrupts.pressed:
                raise KeyboardInterrupt
            for one in ready:
                if one in outputs:
                    outputs[one].hold_output()
                elif one in waiting and self._is_ready(waiting[one]):
                    del waiting[one]

    def _is_ready(self, member: Member) -> bool:
        try:
            message, _ = channel.receive(member.connection)
        except (EOFError, OSError):
            member.process.join(1)
            said = member.read_output().decode(errors="replace").strip().splitlines()
            reason = said[-1] if said else f"it ended with exit code {member.process.exitcode}"
            raise errors.of_start(member.rank, reason) from None
        if isinstance(message, Report):
            raise errors.of_start(member.rank, message)
        if isinstance(message, Ready):
            member.preloaded = message.preloaded
        # else an answer that nobody waits for any more
        return isinstance(message, Ready)

    def _read_clock(self, member: Member) -> float:
        member.tell(("clock",))
        with contextlib.suppress(EOFError, OSError):
            while True:
                match channel.receive(member.connection)[0]:
                    case ("clock", moment):
                        return float(moment)
        raise errors.of_start(member.rank, "it ended at once")
