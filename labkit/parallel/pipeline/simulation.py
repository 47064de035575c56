"""How long a schedule takes, from what its actions and links cost: bubble, total and activations, before anything runs.

The costs may be floats, or fractions where the answer is to be exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from labkit.collectives import Network
from labkit.parallel.pipeline.action_lists import Schedule, needs
from labkit.parallel.pipeline.actions import Action
from labkit.parallel.pipeline.legality import check_schedule

#: one number for all stages, or one for each
PerStage: TypeAlias = Any


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of each kind of action, for all stages alike or a list with one for each stage.

    `backward_input` and `backward_weight` are the two parts of a backward, half of it each where not given.
    """

    forward: PerStage = 1
    backward: PerStage = 2
    backward_input: PerStage = None
    backward_weight: PerStage = None

    def of(self, action: Action) -> Any:
        """What the action takes."""
        if action.kind in "FB":
            return _at(self.forward if action.kind == "F" else self.backward, action.stage)
        whole = _at(self.backward, action.stage)
        inputs, weights = _at(self.backward_input, action.stage), _at(self.backward_weight, action.stage)
        if action.kind == "I":
            return inputs if inputs is not None else whole - (whole / 2 if weights is None else weights)
        return weights if weights is not None else whole - (whole / 2 if inputs is None else inputs)


@dataclass(frozen=True)
class Link:
    """Between any two ranks: a message keeps its sender's outlet busy for `sending` and arrives `latency` after that.
    Messages of one rank leave one after the other; the rank goes on meanwhile."""

    latency: Any = 0
    sending: Any = 0

    @staticmethod
    def of(network: Network, nbytes: int) -> "Link":
        """A link of an emulated network, in seconds, for messages of `nbytes`."""
        return Link(network.latency, nbytes * network.seconds_per_byte)


class Timed(NamedTuple):
    """An action and when it takes place."""

    action: Action
    start: Any
    end: Any


@dataclass(frozen=True)
class Simulation:
    """What `simulate` predicts: for each rank its actions with their times."""

    schedule: Schedule
    rows: tuple[tuple[Timed, ...], ...]

    @property
    def total(self) -> Any:
        """From the first action to the end of the last."""
        return max(timed.end for row in self.rows for timed in row)

    @property
    def busy(self) -> list[Any]:
        """How long each rank computes."""
        return [sum(timed.end - timed.start for timed in row) for row in self.rows]

    @property
    def bubble(self) -> Any:
        """How much longer the step takes than the busiest rank computes."""
        return self.total - max(self.busy)

    @property
    def idle_share(self) -> Any:
        """The part of all ranks' time in which they do nothing. With equal costs and free links GPipe and 1F1B have
        (K - 1) / (M + K - 1) (Huang and others, arXiv:1811.06965, section 2.3)."""
        return 1 - sum(self.busy) / (self.total * len(self.rows))

    @property
    def peak_alive(self) -> list[int]:
        """The most micro-batches whose activations each rank keeps at a time."""
        return self.schedule.peak_alive


def simulate(schedule: Schedule, costs: Costs | None = None, link: Link | None = None) -> Simulation:
    """When each action takes place. An illegal schedule raises IllegalScheduleError, a list of costs that does not fit
    the stages a ValueError."""
    costs, link = costs or Costs(), link or Link()
    forward_only = not any(action.kind != "F" for row in schedule.rows for action in row)
    check_schedule(schedule, forward_only=forward_only)
    for name in ("forward", "backward", "backward_input", "backward_weight"):
        value = getattr(costs, name)
        if isinstance(value, Sequence) and len(value) != schedule.stages:
            raise ValueError(f"simulate: {name} has {len(value)} costs for {schedule.stages} stages; give one for each")
    splits, owners = schedule.splits_backward, schedule.owners
    arrived: dict[Action, Any] = {}  # when it is at hand where it is needed
    done: dict[Action, Any] = {}
    clocks: list[Any] = [0] * schedule.ranks
    outlets: list[Any] = [0] * schedule.ranks
    rows: list[list[Timed]] = [[] for _ in schedule.rows]
    going = True
    while going:
        going = False
        for rank, row in enumerate(schedule.rows):
            while len(rows[rank]) < len(row):
                action = row[len(rows[rank])]
                wanted = needs(action, schedule.stages, splits)
                if any(one not in done for one in wanted):
                    break
                ready = [done[one] if owners[one.stage] == rank else arrived[one] for one in wanted]
                start = max([clocks[rank], *ready])
                end = start + costs.of(action)
                rows[rank].append(Timed(action, start, end))
                clocks[rank] = done[action] = end
                if _sends(action, schedule, owners):
                    outlets[rank] = max(end, outlets[rank]) + link.sending
                    arrived[action] = outlets[rank] + link.latency
                going = True
    return Simulation(schedule, tuple(map(tuple, rows)))


def _sends(action: Action, schedule: Schedule, owners: dict[int, int]) -> bool:
    """Whether another rank needs what this action makes."""
    if action.kind == "W":
        return False
    other = action.stage + (1 if action.kind == "F" else -1)
    return 0 <= other < schedule.stages and owners[other] != owners[action.stage]


def _at(value: PerStage, stage: int) -> Any:
    return value[stage] if isinstance(value, Sequence) else value
