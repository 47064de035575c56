"""One call on all ranks, followed until every rank has answered or is given up.

It prints what the ranks write, notices a stall, frees the ranks that wait for one that failed, and decides which of
several errors is the cause.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from labkit.ranks import channel, errors, faults
from labkit.ranks.interrupts import Interrupts
from labkit.ranks.jobs import Answer
from labkit.ranks.output import Output
from labkit.ranks.phrases import ABSENT, FINISHED, SILENT, those
from labkit.ranks.processes import Member
from labkit.ranks.reports import Report
from labkit.ranks.stalls import StallWatch
from labkit.ranks.team import Team
from labkit.ranks.whereabouts import Whereabouts

MERGE = 0.05  # seconds between two looks whether the others wait for a rank that failed
PATIENCE = 0.5  # seconds after which the others are freed, wherever they are
GRACE = 2.0  # seconds that the others have to stop after a failure
INTERRUPT = 1.5  # seconds that ranks have to stop after an interrupt
POLL = 0.5  # seconds between two questions "where are you?"
ECHO = 0.1  # seconds in which further deaths are counted as the same


class Outcome:
    """What a call came to: answers by rank with their packed results, an error or None, and what is left to do."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.results: dict[int, bytes] = {}
        self.error: errors.RankError | None = None
        self.must_kill = False
        self.must_regroup = False


class Calling:
    """Follows one call. `run()` returns its outcome; it never raises but for a fault of labkit's own."""

    def __init__(
        self, team: Team, number: int, chosen: Sequence[int], output: Output, timeout: float, interrupts: Interrupts
    ) -> None:
        self.members, self.folder, self.number, self.chosen = team.members, team.folder, number, chosen
        self.output, self.timeout, self.interrupts = output, timeout, interrupts
        self.rebuilt = team.groups > 1
        self.pending = set(chosen)
        self.outcome = Outcome()
        self.reports: dict[int, Report] = {}
        self.deaths: dict[int, int | None] = {}
        self.seen: dict[int, Whereabouts] = {}
        self.asked: set[int] = set()
        self.stalls = StallWatch(timeout)
        self.failed_at: float | None = None
        self.freed = self.expired = self.news = False
        self.before: dict[int, Whereabouts] = {}  # where they were at the last step after a failure
        self.next_step = time.perf_counter() + min(POLL, timeout / 4)

    def run(self) -> Outcome:
        self.follow()
        for member in self.members:
            self.output.feed(member.rank, member.read_output())
        self.output.finish()
        if self.interrupts.pressed:
            self.conclude_interrupt()
        else:
            self.conclude()
        return self.outcome

    # --- following ---

    def follow(self) -> None:
        while self.pending and not self.deaths:
            self.listen(max(0.0, self.next_step - time.perf_counter()))
            if self.interrupts.pressed:
                self.interrupt()
                return
            now = time.perf_counter()
            if self.failed_at is not None:
                if now - self.failed_at >= GRACE:  # they had their time
                    self.locate()
                    return
                if now >= self.next_step and not self.freed:
                    self.free_others(now - self.failed_at)
                    self.next_step = self.failed_at + GRACE if self.freed else now + MERGE
            else:
                if self.news and (not self.asked or now >= self.next_step):
                    self.look_for_stall()
                if now >= self.next_step:
                    self.next_step = now + min(POLL, self.timeout / 4)
                    self.ask()
        if self.deaths:
            self.listen_for(ECHO)

    def listen(self, seconds: float) -> None:
        """Wait for output, messages or deaths, and take them."""
        sources: dict[Any, tuple[str, Member]] = {}
        for member in self.members:
            if member.rank not in self.deaths:
                sources[member.output] = ("output", member)
                sources[member.connection] = ("message", member)
                sources[member.process.sentinel] = ("death", member)
        ready = wait([self.interrupts.bell, *sources], seconds)
        if self.interrupts.bell in ready:
            self.interrupts.heard()
        # a rank's last words before its death
        order = ("output", "message", "death")
        for what, member in sorted(
            (sources[one] for one in ready if one in sources), key=lambda one: order.index(one[0])
        ):
            if what == "output":
                self.output.feed(member.rank, member.read_output())
            elif what == "message":
                self.hear(member)
            elif member.rank not in self.deaths:
                while member.connection.poll() and self.hear(member):
                    pass
                self.bury(member)

    def listen_for(self, seconds: float) -> None:
        """Listen so long, at most until nobody is left to hear of, or the stop button is pressed again."""
        end = time.perf_counter() + seconds
        while self.pending - set(self.deaths) and (rest := end - time.perf_counter()) > 0:
            if self.interrupts.pressed > 1:
                return
            self.listen(rest)

    def hear(self, member: Member) -> bool:
        try:
            message, load = channel.receive(member.connection)
        except (EOFError, OSError):
            self.bury(member)
            return False
        match message:
            case Answer() if message.number == self.number:
                self.outcome.answers[member.rank] = message
                self.outcome.results[member.rank] = load
                self.pending.discard(member.rank)
                self.seen.pop(member.rank, None)
            case Report():
                self.reports[member.rank] = message
                if self.failed_at is None:
                    self.failed_at = self.next_step = time.perf_counter()
            case Whereabouts():
                self.asked.discard(member.rank)
                self.news = True
                if member.rank in self.pending:
                    self.seen[member.rank] = message
        return True

    def bury(self, member: Member) -> None:
        member.process.join(1)
        self.deaths[member.rank] = member.process.exitcode

    def ask(self, *, with_stack: bool = False) -> None:
        for rank in self.pending - self.asked:
            self.asked.add(rank)
            self.members[rank].tell(("where", with_stack))

    # --- failures ---

    def free_others(self, seconds: float) -> None:
        """Some rank failed so many seconds ago. If others wait and stand still, all connections are shut. If none does,
        they may be about to fail in the same way, and then the group needs no rebuilding."""
        stuck = any(
            where.stands_still_since(self.before[rank]) for rank, where in self.seen.items() if rank in self.before
        )
        if stuck or seconds >= PATIENCE:
            self.free()
            return
        self.before, self.seen = self.seen, {}
        self.ask()

    def free(self) -> None:
        self.freed = True
        for member in self.members:
            member.tell("free")

    def locate(self) -> None:
        """Ask those that did not stop for their stacks."""
        self.seen.clear()
        self.asked.clear()
        self.ask(with_stack=True)
        end = time.perf_counter() + PATIENCE
        while self.unlocated() and not self.deaths and (rest := end - time.perf_counter()) > 0:
            self.listen(rest)
        for rank in self.unlocated():
            if found := faults.provoke(self.folder, rank, self.members[rank].pid):
                self.seen[rank] = replace(found, state="silent")

    def unlocated(self) -> set[int]:
        return {rank for rank in self.pending if rank not in self.seen or not self.seen[rank].stack}

    def conclude(self) -> None:
        outcome, size = self.outcome, len(self.members)
        if self.deaths:
            # the others go with it; what they say after it is its echo
            places = {rank: faults.read(self.folder, rank) for rank in self.deaths}
            outcome.error, outcome.must_kill = errors.of_deaths(self.deaths, places), True
            return
        ungrouped = any(not answer.grouped for answer in outcome.answers.values())
        finished = [rank for rank in outcome.answers if rank not in self.reports]
        reports = self.reports
        if self.expired:
            # the connections were shut for having waited too long
            late = {rank: replace(one, kind="timeout") for rank, one in reports.items() if one.kind == "connection"}
            reports = {**reports, **late}
        busy = {rank: self.seen.get(rank) for rank in self.pending}
        if reports:
            outcome.error = errors.of_reports(reports, finished, size, self.timeout, rebuilt=self.rebuilt)
        elif busy:
            words, stacks = errors.words_of(busy), errors.stacks_of(busy)
            outcome.error = errors.of_timeout(words, finished, size, self.timeout, stacks, None)
        if busy and outcome.error:
            outcome.error, outcome.must_kill = errors.of_busy(outcome.error, busy, size, GRACE), True
            return
        same = not finished and len({one.signature for one in reports.values()}) == 1
        unfinished = any(one.unfinished for one in reports.values())
        # the same error everywhere leaves no message on its way; else the group may hold half of an exchange
        outcome.must_regroup = self.freed or unfinished or ungrouped or bool(reports and not same)

    # --- stalls ---

    def look_for_stall(self) -> None:
        self.news = False
        others = {rank: FINISHED if rank in self.chosen else ABSENT for rank in range(len(self.members))}
        # asked before and no answer since
        others.update(dict.fromkeys(self.asked, SILENT))
        others = {rank: doing for rank, doing in others.items() if rank not in self.pending or rank in self.asked}
        seen = {rank: where for rank, where in self.seen.items() if rank not in self.asked}
        if notice := self.stalls.look(seen, others, len(self.members)):
            print(f"[ranks] {notice}", flush=True)
        if self.stalls.expired:
            self.expired, self.failed_at = True, time.perf_counter()
            self.free()

    # --- the stop button ---

    def interrupt(self) -> None:
        """Stop the ranks: they raise KeyboardInterrupt, or are given up after a moment."""
        for rank in self.pending:
            self.members[rank].tell(("interrupt", self.number))
        self.listen_for(INTERRUPT)

    def conclude_interrupt(self) -> None:
        self.outcome.must_regroup = True
        if self.pending or self.deaths:
            self.outcome.must_kill = True
            ranks = those(self.pending | set(self.deaths), len(self.members))
            print(f"[ranks] {ranks} did not stop: {errors.LOST}", flush=True)
