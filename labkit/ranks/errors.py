"""`RankError`: what went wrong on the ranks, in one stable line, and the learner's own lines when it is shown."""

import contextlib
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.ranks import channel
from labkit.ranks.phrases import FINISHED, SILENT, those, told
from labkit.ranks.reports import LOST_CONNECTION, STALE, Report
from labkit.ranks.whereabouts import Whereabouts

LOST = "what the ranks held is lost, the next call starts them anew"


class RankError(RuntimeError):
    """An error on one or more ranks. `str()` is one line without paths or process numbers.

    Attributes:
        kind: "exception", "timeout", "death", "busy" (a peer did not stop after another's failure), "start" or
            "closed".
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


class RankTypeError(RankError, TypeError):
    """What a rank returned can't be sent to the notebook: a RankError that is a TypeError too."""


def of_reports(
    reports: Mapping[int, Report], finished: Iterable[int], world_size: int, limit: float, *, rebuilt: bool
) -> RankError:
    """The error for ranks that reported. The root cause is the earliest report that is no echo of another's end.

    `limit` is the timeout; `rebuilt` tells whether these ranks have had a group before their present one.
    """
    ordered = sorted(reports.values(), key=lambda one: one.time)
    roots = next(found for kind in ("exception", "timeout", "connection") if (found := _of_kind(ordered, kind)))
    root = roots[0]
    if root.kind == "timeout":
        # the ranks that waited are all at fault, or none
        stuck = [one for one in ordered if one.kind != "exception"]
        doings = {one.rank: (f"waits{one.waiting}", f"wait{one.waiting}") for one in stuck}
        details = "".join(f"on rank {one.rank}:\n{one.traceback}" for one in stuck)
        return of_timeout(doings, finished, world_size, limit, details, root)
    if root.kind == "connection":
        # nobody failed before: the group itself is gone
        reason = STALE if rebuilt else LOST_CONNECTION
        message = f"{those([one.rank for one in roots], world_size)} raised {root.type}: {reason}"
        message += f" ({root.place})" if root.place else ""
        ranks = sorted(one.rank for one in roots)
    else:
        ranks = sorted(one.rank for one in roots if one.signature == root.signature)
        message = f"{those(ranks, world_size)} raised {root}"
    peers = [_peer_line(one) for one in ordered if one.rank not in ranks]
    details = f"on {those(ranks, world_size)}:\n{root.traceback}" + "".join(f"\n{line}" for line in peers)
    kind = RankTypeError if root.unsendable else RankError
    return kind(message, kind="exception", ranks=ranks, details=details, cause=root)


def of_timeout(
    doings: Mapping[int, tuple[str, str]],
    finished: Iterable[int],
    world_size: int,
    limit: float,
    details: str,
    cause: Report | None,
) -> RankError:
    """The error for ranks that waited in vain; `doings` says in words what for."""
    message = f"no progress for {limit:g} s: {told({**doings, **dict.fromkeys(finished, FINISHED)}, world_size)}"
    return RankError(message, kind="timeout", ranks=sorted(doings), details=details, cause=cause)


def _of_kind(reports: list[Report], kind: str) -> list[Report]:
    return [one for one in reports if one.kind == kind]


def _peer_line(one: Report) -> str:
    """What a rank did when another failed."""
    return f"rank {one.rank} " + (f"raised {one}" if one.kind == "exception" else f"was waiting{one.waiting}")


def of_deaths(codes: Mapping[int, int | None], places: Mapping[int, Whereabouts | None]) -> RankError:
    """The error for ranks whose processes ended by themselves."""
    endings, details = [], ""
    for rank, code in sorted(codes.items()):
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            memory = " (out of memory, perhaps)" if name == "SIGKILL" else ""
            endings.append(f"rank {rank} was killed by {name}{memory}")
        else:
            endings.append(f"rank {rank} ended with exit code {code}")
        if where := places.get(rank):
            endings[-1] += f" ({where.place})" if where.place else ""
            details += f"rank {rank} was here:\n{where.stack}\n"
    return RankError(f"{'; '.join(endings)}; {LOST}", kind="death", ranks=sorted(codes), details=details)


def of_busy(error: RankError, busy: Mapping[int, Whereabouts | None], world_size: int, grace: float) -> RankError:
    """The error where a peer was still busy after the grace: `error` is the root cause. None: no answer."""
    doings, stacks = words_of(busy), stacks_of(busy)
    message = f"{error}; did not stop within {grace:g} s: {told(doings, world_size)}; {LOST}"
    result = type(error)(message, kind="busy", ranks=error.ranks, details=error.details + stacks)
    result.type, result.place, result.exception = error.type, error.place, error.exception
    return result


def words_of(seen: Mapping[int, Whereabouts | None]) -> dict[int, tuple[str, str]]:
    """What ranks do; None: they don't answer."""
    return {rank: where.words if where else SILENT for rank, where in seen.items()}


def stacks_of(seen: Mapping[int, Whereabouts | None]) -> str:
    """Where ranks are, for people."""
    return "".join(f"\nrank {rank} was here:\n{where.stack}" for rank, where in sorted(seen.items()) if where)


def of_result(rank: int, reason: str) -> RankError:
    """The error for a result that arrived and can't be rebuilt."""
    message = f"the result of rank {rank} can't be rebuilt here ({reason}): return tensors, numbers, strings or lists"
    return RankTypeError(message, kind="exception", ranks=[rank])


def of_start(rank: int, reason: Any) -> RankError:
    """The error for a rank that could not start."""
    details = reason.traceback if isinstance(reason, Report) else ""
    return RankError(f"rank {rank} could not start: {reason}", kind="start", ranks=[rank], details=details)


def of_closing(world_size: int) -> RankError:
    """The error of a call during which the ranks were closed."""
    return RankError("the ranks were closed during this call", kind="closed", ranks=range(world_size))
