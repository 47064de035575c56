"""`Schedule`: for each rank the list of its actions, in order. Plain data: the runtime executes it, the simulator times
it, the picture draws it, and whoever wants another one writes another list."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.parallel.pipeline.actions import Action


@dataclass(frozen=True)
class Schedule:
    """What each rank does in one step of a pipeline, in this order: `rows[rank]` is a rank's list of actions.

    Sends and receives are not written down: whoever computes what another rank needs sends it at once, and whoever
    needs it waits for it. `print` shows the table. `check_schedule` says whether it can run.
    """

    rows: tuple[tuple[Action, ...], ...]
    name: str = "own"
    stages: int = field(init=False)
    micro_batches: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(tuple(row) for row in _listed(self.rows)))
        actions = [action for row in self.rows for action in row]
        if not actions:
            raise ValueError("Schedule: no rank has an action; give each rank a list of them")
        object.__setattr__(self, "stages", 1 + max(action.stage for action in actions))
        object.__setattr__(self, "micro_batches", 1 + max(action.micro_batch for action in actions))

    @staticmethod
    def of(rows: Iterable[str | Sequence[Action | str]], *, name: str = "own") -> "Schedule":
        """From texts, one a rank: `Schedule.of(["F0 F1 B0 B1", "F0 B0 F1 B1"])`. An action without a stage in front is
        one of the stage that has the rank's number. Lists of actions are taken too."""
        read = []
        for rank, row in enumerate(_listed(rows)):
            parts = row.split() if isinstance(row, str) else list(row)
            read.append(tuple(Action.read(part, rank) for part in parts))
        return Schedule(tuple(read), name)

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return len(self.rows)

    @property
    def owners(self) -> dict[int, int]:
        """stage -> the rank that has it; the first one where several claim it."""
        found: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                found.setdefault(action.stage, rank)
        return found

    @property
    def splits_backward(self) -> set[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose backward comes as I and W."""
        return {(action.stage, action.micro_batch) for row in self.rows for action in row if action.kind in "IW"}

    def forward_only(self) -> "Schedule":
        """The forwards alone, in the same order: an evaluation."""
        rows = [[action for action in row if action.kind == "F"] for row in self.rows]
        return Schedule(tuple(map(tuple, rows)), self.name)

    def alive(self, rank: int) -> list[int]:
        """After each action of the rank, for how many micro-batches it keeps activations: from F until B or W. With
        several stages a rank each counts by itself."""
        counts, count = [], 0
        for action in self.rows[rank]:
            count += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            counts.append(count)
        return counts

    @property
    def peak_alive(self) -> list[int]:
        """The most micro-batches whose activations each rank keeps at a time."""
        return [max(self.alive(rank), default=0) for rank in range(self.ranks)]

    def __str__(self) -> str:
        """The table: a row a rank, a column a moment in which every action takes equally long; "." waits."""
        several = self.stages > self.ranks
        slots = _slots(self)
        width = max(len(_short(action, several)) for row in self.rows for action in row)
        lines = []
        for rank, row in enumerate(self.rows):
            cells = {slots[rank][number]: _short(action, several) for number, action in enumerate(row)}
            last = max(cells, default=-1)
            told = " ".join(cells.get(slot, ".").ljust(width) for slot in range(last + 1))
            lines.append(f"rank {rank}  {told.rstrip()}")
        return "\n".join(lines)


def _listed(rows: Any) -> list[Any]:
    """The ranks' rows, or a TypeError where they are no lists."""
    every = [] if isinstance(rows, str) or not isinstance(rows, Iterable) else list(rows)
    if not every or not all(isinstance(row, Iterable) for row in every):
        raise TypeError(
            f"Schedule: {rows!r:.80} is no list with the actions of each rank: give ['F0 B0', 'F0 B0'], say"
        )
    return every


def needs(action: Action, schedule_stages: int, splits: set[tuple[int, int]]) -> list[Action]:
    """What must be done before `action`, on whichever rank: its own forward, and what a neighbouring stage sends.

    `splits` are the (stage, micro-batch) pairs whose backward comes as I and W.
    """
    kind, micro_batch, stage = action
    if kind == "F":
        return [Action("F", micro_batch, stage - 1)] if stage else []
    if kind == "W":
        return [Action("I", micro_batch, stage)]
    own = [Action("F", micro_batch, stage)]
    if stage == schedule_stages - 1:
        return own
    after = "I" if (stage + 1, micro_batch) in splits else "B"
    return [*own, Action(after, micro_batch, stage + 1)]


def _short(action: Action, several: bool) -> str:
    return str(action) if several else str(action)[len(str(action.stage)) :]


def _slots(schedule: Schedule) -> list[list[int]]:
    """The column of each action: as early as what it needs allows. What can never run comes after all else."""
    splits, done = schedule.splits_backward, dict[Action, int]()
    places: list[list[int]] = [[] for _ in schedule.rows]
    going = True
    while going:
        going = False
        for rank, row in enumerate(schedule.rows):
            while len(places[rank]) < len(row):
                wanted = needs(row[len(places[rank])], schedule.stages, splits)
                if any(one not in done for one in wanted):
                    break
                free = places[rank][-1] + 1 if places[rank] else 0
                slot = max([free, *(done[one] + 1 for one in wanted)])
                done.setdefault(row[len(places[rank])], slot)
                places[rank].append(slot)
                going = True
    last = 1 + max((slot for row in places for slot in row), default=0)
    for rank, row in enumerate(schedule.rows):
        places[rank] += range(last, last + len(row) - len(places[rank]))
    return places
