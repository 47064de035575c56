"""Noticing that ranks wait for something that does not come, and saying so before the timeout does."""

from collections.abc import Mapping

from labkit.ranks.phrases import SILENT, told
from labkit.ranks.whereabouts import Whereabouts

NOTICE = 5.0  # seconds without progress until a stall is told of
SLACK = 0.2  # seconds that gloo has to end a wait by itself


class StallWatch:
    """Follows where the ranks are. `limit` is the timeout: the notice comes well before it.

    gloo ends a collective itself at the timeout, a single message far too late: `expired` tells of both.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.notice = limit, min(NOTICE, limit / 2)
        self.since: dict[int, Whereabouts] = {}
        self.told: set[object] = set()
        self.expired = False  # whether a rank has waited longer than it may

    def look(
        self, seen: Mapping[int, Whereabouts], others: Mapping[int, tuple[str, str]], world_size: int
    ) -> str | None:
        """The text of a notice, if there is something new to tell. `others` says what the ranks do that are not in
        `seen`: they finished, say."""
        waits = {rank: self._seconds(rank, where) for rank, where in sorted(seen.items())}
        self.expired = max(waits.values(), default=0.0) > self.limit + SLACK
        # ranks that stopped a moment apart are told of together
        stalled = {rank: seen[rank] for rank, seconds in waits.items() if seconds >= 0.8 * self.notice}
        state = tuple((rank, where.operation, where.place, where.progress) for rank, where in stalled.items())
        if max(waits.values(), default=0.0) < self.notice or state in self.told:
            return None
        self.told.add(state)
        doings = {**others, **{rank: where.words for rank, where in seen.items()}}
        everybody = all(where.operation for where in seen.values()) and SILENT not in others.values()
        what = "no progress" if everybody else "waiting"
        return f"{what} for {self.notice:g} s: {told(doings, world_size)} (an error follows at {self.limit:g} s)"

    def _seconds(self, rank: int, where: Whereabouts) -> float:
        """How long this rank has stood still."""
        before = self.since.setdefault(rank, where)
        if not where.stands_still_since(before):
            before = self.since[rank] = where
        return max(where.seconds, where.moment - before.moment)
