"""One call on all ranks, followed from the notebook's main thread until every rank has answered or is given up.

It prints what the ranks write, notices a stall, frees the ranks that wait for one that failed, and decides which of
several errors is the cause.
"""

import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from labkit.ranks import channel, errors
from labkit.ranks.output import Output
from labkit.ranks.processes import Member
from labkit.ranks.reports import Report
from labkit.ranks.whereabouts import Whereabouts
from labkit.ranks.worker import Answer

MERGE = 0.05  # seconds in which the same exception may still arrive from the other ranks
GRACE = 2.0  # seconds that the others have to stop after a failure
INTERRUPT = 1.5  # seconds that ranks have to stop after an interrupt
NOTICE = 5.0  # seconds without progress until a stall is told of
POLL = 1.0  # seconds between two questions "where are you?"


class Outcome:
    """What a call came to: answers by rank, an error or None, and whether the ranks can go on."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.error: errors.RankError | None = None
        self.interrupted = False
        self.must_kill = False
        self.must_regroup = False


class Calling:
    """Follows one call. `run()` returns its outcome; it never raises but for a fault of labkit's own."""

    def __init__(self, members: Sequence[Member], number: int, output: Output, *, timeout: float) -> None:
        self.members, self.number, self.output, self.timeout = members, number, output, timeout
        self.pending = {member.rank for member in members}
        self.outcome = Outcome()
        self.reports: dict[int, Report] = {}
        self.deaths: dict[int, int | None] = {}
        self.seen: dict[int, Whereabouts] = {}
        self.since: dict[int, tuple[Any, float]] = {}
        self.told: set[str] = set()
        self.first_failure: float | None = None
        self.freed = self.asked = False
        self.next_poll = time.perf_counter() + POLL

    def run(self) -> Outcome:
        try:
            self.follow()
        except KeyboardInterrupt:
            self.interrupt()
        self.drain()
        self.output.finish()
        if not self.outcome.interrupted:
            self.conclude()
        return self.outcome

    # --- following ---

    def follow(self) -> None:
        while self.pending and not self.deaths:
            self.listen(self.patience())
            now = time.perf_counter()
            if self.first_failure is not None:
                if self.after_failure(now - self.first_failure):
                    return
            elif now >= self.next_poll:
                self.look_for_stall(now)

    def patience(self) -> float:
        """Seconds until something has to be done without being told to."""
        now = time.perf_counter()
        if self.first_failure is None:
            return max(0.0, self.next_poll - now)
        limit = MERGE if not self.freed else GRACE if not self.asked else GRACE + 0.5
        return max(0.0, self.first_failure + limit - now)

    def listen(self, seconds: float) -> None:
        """Wait for output, messages or deaths, and take them."""
        sources: dict[Any, tuple[str, Member]] = {}
        for member in self.members:
            sources[member.output] = ("output", member)
            sources[member.connection] = ("message", member)
            sources[member.process.sentinel] = ("death", member)
        ready = [sources[source] for source in wait(list(sources), seconds)]
        # a rank's last words before its death
        for what, member in sorted(ready, key=lambda one: ("output", "message", "death").index(one[0])):
            if what == "output":
                self.output.feed(member.rank, member.read_output())
            elif what == "message":
                self.hear(member)
            elif member.rank in self.pending:
                while member.connection.poll() and self.hear(member):
                    pass
                if member.rank in self.pending or member.process.exitcode is not None:
                    member.process.join(1)
                    self.deaths[member.rank] = member.process.exitcode

    def hear(self, member: Member) -> bool:
        try:
            message = channel.unpack(member.connection.recv_bytes())
        except (EOFError, OSError):
            member.process.join(1)
            if member.rank in self.pending:
                self.deaths[member.rank] = member.process.exitcode
            return False
        match message:
            case Answer() if message.number == self.number:
                self.outcome.answers[member.rank] = message
                self.pending.discard(member.rank)
                self.seen.pop(member.rank, None)
            case ("failed", Report() as report):
                self.reports[member.rank] = report
                if self.first_failure is None:
                    self.first_failure = time.perf_counter()
            case ("where", Whereabouts() as where):
                if member.rank in self.pending:
                    self.seen[member.rank] = where
        return True

    # --- failures ---

    def after_failure(self, seconds: float) -> bool:
        """Free the others, wait for them, and give up; True when given up."""
        if seconds >= MERGE and not self.freed:
            self.freed = True
            for rank in self.reports:
                self.members[rank].tell(("free",))
        elif self.freed and seconds >= MERGE:
            for rank, report in self.reports.items():
                # one that failed later may have others waiting for it
                if report.kind == "exception" and rank in self.pending:
                    self.members[rank].tell(("free",))
        if seconds >= GRACE and not self.asked:
            self.asked = True
            self.ask()
        return seconds >= GRACE + 0.5

    def ask(self) -> None:
        for rank in self.pending:
            self.members[rank].tell(("where",))

    def conclude(self) -> None:
        outcome, size = self.outcome, len(self.members)
        if self.deaths:
            # the others go with it; what they say after it is its echo
            outcome.error, outcome.must_kill = errors.of_deaths(self.deaths, size), True
            return
        if not self.reports:
            return
        outcome.error = errors.of_reports(self.reports, self.seen, size, self.timeout)
        if self.pending:
            busy = {rank: self.seen.get(rank, Whereabouts("busy")) for rank in self.pending}
            outcome.error, outcome.must_kill = errors.of_busy(outcome.error, busy, size), True
            return
        same = len(self.reports) == size and len({one.signature for one in self.reports.values()}) == 1
        unfinished = any(one.unfinished for one in self.reports.values())
        # the same error everywhere leaves no message on its way; else the group may hold half of an exchange
        outcome.must_regroup = self.freed or unfinished or not same

    # --- stalls ---

    def look_for_stall(self, now: float) -> None:
        self.next_poll = now + POLL
        notice = min(NOTICE, self.timeout / 2)
        stalled = {}
        for rank, where in self.seen.items():
            token = (where.operation, where.place, where.progress)
            known, since = self.since.get(rank, (None, now))
            if token != known:
                self.since[rank] = (token, since := now)
            if where.operation and max(where.seconds, now - since + POLL) >= notice:
                stalled[rank] = where
        if stalled:
            self.tell_of_stall(stalled)
        self.ask()

    def tell_of_stall(self, stalled: dict[int, Whereabouts]) -> None:
        size = len(self.members)
        told = [f"rank {rank} {where}" for rank, where in sorted(self.seen.items())]
        if finished := [member.rank for member in self.members if member.rank not in self.pending]:
            told.append(f"{errors.those(finished, size)} finished")
        text = "; ".join(told)
        if text not in self.told:
            self.told.add(text)
            notice = min(NOTICE, self.timeout / 2)
            print(f"[ranks] no progress for {notice:g} s: {text} (an error follows at {self.timeout:g} s)", flush=True)

    # --- the stop button ---

    def interrupt(self) -> None:
        """Stop the ranks: they raise KeyboardInterrupt, or are killed after a moment."""
        self.outcome.interrupted = True
        try:
            for rank in self.pending:
                self.members[rank].tell(("interrupt",))
            end = time.perf_counter() + INTERRUPT
            while self.pending and not self.deaths and (rest := end - time.perf_counter()) > 0:
                self.listen(rest)
        except KeyboardInterrupt:
            pass  # pressed twice: at once, then
        if self.pending or self.deaths:
            self.outcome.must_kill = True
            ranks = errors.those(sorted(self.pending), len(self.members))
            print(f"[ranks] {ranks} did not stop within {INTERRUPT} s: {errors.LOST}", flush=True)
        self.outcome.must_regroup = True

    def drain(self) -> None:
        for member in self.members:
            self.output.feed(member.rank, member.read_output())
