"""`RankError`: what went wrong on the ranks, in one stable line, and the learner's own lines when it is shown."""

import contextlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.ranks import channel
from labkit.ranks.reports import Report
from labkit.ranks.whereabouts import Whereabouts

LOST = "what the ranks held is lost, the next call starts them anew"


class RankError(RuntimeError):
    """An error on one or more ranks. `str()` is one line without paths or process numbers.

    Attributes:
        kind: "exception", "timeout", "death", "busy" (a peer did not stop after another's failure) or "start".
        ranks: the ranks that caused it.
        type: the name of the exception's class on the rank, "" for a death.
        place: the learner's line, such as "line 2", "" where unknown.
        details: tracebacks, and what the other ranks did, for people.
        exception: the rank's exception itself, None where it could not travel.
    """

    def __init__(
        self, message: str, *, kind: str, ranks: Sequence[int], details: str = "", cause: Report | None = None
    ):
        super().__init__(message)
        self.kind, self.ranks, self.details = kind, list(ranks), details
        self.type = cause.type if cause else ""
        self.place = cause.place if cause else ""
        self.exception: BaseException | None = None
        if cause is not None and cause.exception is not None:
            with contextlib.suppress(Exception):  # a class that can't be rebuilt here
                self.exception = channel.unpack(cause.exception)
        if details:
            self.add_note(details)  # shown by plain Python and pytest

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the line, then the rank's own traceback. Frames of labkit say nothing to a learner."""
        return [f"RankError: {self}", "", *self.details.splitlines()]


def those(ranks: Sequence[int], world_size: int) -> str:
    """The ranks in words: "rank 1", "ranks 0 and 2", "all ranks"."""
    if len(ranks) == world_size and world_size > 1:
        return "all ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def of_reports(
    reports: Mapping[int, Report], seen: Mapping[int, Whereabouts], world_size: int, limit: float
) -> RankError:
    """The error for ranks that reported. The root cause is the earliest report that is no echo of another's end."""
    ordered = sorted(reports.values(), key=lambda one: one.time)
    for kind in ("exception", "timeout", "connection"):
        roots = [one for one in ordered if one.kind == kind]
        if roots:
            break
    root = roots[0]
    ranks = sorted(one.rank for one in roots if one.signature == root.signature)
    peers = [peer_line(one) for one in ordered if one.rank not in ranks]
    details = f"on {those(ranks, world_size)}:\n{root.traceback}" + "".join(f"\n{line}" for line in peers)
    if root.kind == "timeout":
        told = [f"rank {rank} {where}" for rank, where in sorted(seen.items())] or [peer_line(one) for one in roots]
        told += [f"rank {rank} finished" for rank in range(world_size) if rank not in seen and rank not in reports]
        message = f"no progress for {limit:g} s: {'; '.join(told)}"
    else:
        message = f"{those(ranks, world_size)} raised {root}"
    return RankError(
        message, kind="timeout" if root.kind == "timeout" else "exception", ranks=ranks, details=details, cause=root
    )


def peer_line(one: Report) -> str:
    """What a rank did when another failed."""
    place = f", {one.place}" if one.place else ""
    if one.kind == "exception":
        return f"rank {one.rank} raised {one}"
    return f"rank {one.rank} was waiting in {one.operation or 'communication'}{place}"


def of_deaths(codes: Mapping[int, int | None], world_size: int) -> RankError:
    """The error for ranks whose processes ended by themselves."""
    told = []
    for rank, code in sorted(codes.items()):
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            memory = " (out of memory, perhaps)" if name == "SIGKILL" else ""
            told.append(f"rank {rank} was killed by {name}{memory}")
        else:
            told.append(f"rank {rank} ended with exit code {code}")
    return RankError(f"{'; '.join(told)}; {LOST}", kind="death", ranks=sorted(codes))


def of_busy(error: RankError, busy: Mapping[int, Whereabouts], world_size: int) -> RankError:
    """The error where a peer was still busy after the grace: `error` is the root cause."""
    told = "; ".join(f"rank {rank} {where}" for rank, where in sorted(busy.items()))
    stacks = "".join(f"\nrank {rank} was here:\n{where.stack}" for rank, where in sorted(busy.items()))
    message = f"{error}; {those(sorted(busy), world_size)} did not stop ({told}); {LOST}"
    result = RankError(message, kind="busy", ranks=error.ranks, details=error.details + stacks)
    result.type, result.place, result.exception = error.type, error.place, error.exception
    return result


def of_start(rank: int, reason: Any) -> RankError:
    """The error for a rank that could not start."""
    details = reason.traceback if isinstance(reason, Report) else ""
    return RankError(f"rank {rank} could not start: {reason}", kind="start", ranks=[rank], details=details)
