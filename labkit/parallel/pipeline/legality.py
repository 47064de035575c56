"""May a schedule run? Everything that would end in a wrong gradient, or in ranks that wait for ever, has its sentence.

It is refused before anything is sent. Sends never block a rank here, so that a deadlock is always one of receives.
"""

from collections import Counter

from labkit.parallel.pipeline.action_lists import Schedule, needs
from labkit.parallel.pipeline.actions import KINDS, Action


class IllegalScheduleError(ValueError):
    """A schedule that can't run. `reasons` holds all that was found, the message the first."""

    def __init__(self, name: str, reasons: list[str]) -> None:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        super().__init__(f"schedule {name!r}: {reasons[0]}{more}")
        self.name, self.reasons = name, reasons

    def __reduce__(self) -> tuple[type["IllegalScheduleError"], tuple[str, list[str]]]:
        return IllegalScheduleError, (self.name, self.reasons)


def check_schedule(
    schedule: Schedule,
    *,
    ranks: int | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    max_alive: int | None = None,
    forward_only: bool = False,
) -> None:
    """Raise `IllegalScheduleError` with the reason where the schedule can't run.

    Args:
        schedule: the lists of actions.
        ranks, stages, micro_batches: what it must be made for, where that is known.
        max_alive: for how many micro-batches any rank may keep activations at a time.
        forward_only: an evaluation, which has no backward.
    """
    reasons = schedule_faults(
        schedule,
        ranks=ranks,
        stages=stages,
        micro_batches=micro_batches,
        max_alive=max_alive,
        forward_only=forward_only,
    )
    if reasons:
        raise IllegalScheduleError(schedule.name, reasons)


def schedule_faults(
    schedule: Schedule,
    *,
    ranks: int | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    max_alive: int | None = None,
    forward_only: bool = False,
) -> list[str]:
    """All that keeps the schedule from running, as sentences; empty where it may. Arguments as for `check_schedule`."""
    sizes = [
        ("ranks", ranks, schedule.ranks),
        ("stages", stages, schedule.stages),
        ("micro-batches", micro_batches, schedule.micro_batches),
    ]
    others = [f"it is for {has} {what}, not for {want}" for what, want, has in sizes if want not in (None, has)]
    reasons = _unknown(schedule) or _unowned(schedule) or others or _far_off(schedule) or _repeated(schedule)
    reasons = reasons or _out_of_order(schedule) + _missing(schedule, forward_only)
    reasons = reasons or _deadlock(schedule)
    if max_alive is not None and not forward_only:
        reasons = reasons + _too_many_alive(schedule, max_alive)
    return reasons


def _unknown(schedule: Schedule) -> list[str]:
    bad = [(r, a) for r, row in enumerate(schedule.rows) for a in row if a.kind not in KINDS or min(a[1:]) < 0]
    return [f"rank {r} has {tuple(a)}, which is no action: kinds are {', '.join(KINDS)}" for r, a in bad]


def _far_off(schedule: Schedule) -> list[str]:
    """Numbers beyond all that the lists could hold: naming every action that is not there would take for ever."""
    most = sum(map(len, schedule.rows))
    counts = (("micro-batch", schedule.micro_batches), ("stage", schedule.stages))
    return [
        f"it names {what} {count - 1}, but has {most} actions in all: number from 0 on"
        for what, count in counts
        if count > most
    ]


def _unowned(schedule: Schedule) -> list[str]:
    reasons, owners = [], schedule.owners
    for rank, row in enumerate(schedule.rows):
        for stage in sorted({action.stage for action in row}):
            if owners[stage] != rank:
                reasons.append(f"stage {stage} is on rank {owners[stage]} and on rank {rank}: a stage has one rank")
    return reasons


def _repeated(schedule: Schedule) -> list[str]:
    counts = Counter(action for row in schedule.rows for action in row)
    return [f"{action.words} comes {count} times: once is right" for action, count in counts.items() if count > 1]


def _out_of_order(schedule: Schedule) -> list[str]:
    """What a rank itself has in the wrong order."""
    reasons, splits = [], schedule.splits_backward
    for rank, row in enumerate(schedule.rows):
        place = {action: number for number, action in enumerate(row)}
        for action in row:
            for one in needs(action, schedule.stages, splits):
                if one.stage == action.stage and place.get(one, -1) > place[action]:
                    reasons.append(f"rank {rank} runs {action.words} before its {KINDS[one.kind]}")
    return reasons


def _missing(schedule: Schedule, forward_only: bool) -> list[str]:
    """What nobody does: a message that is waited for and never sent, or a gradient that is never computed."""
    everything = {action for row in schedule.rows for action in row}
    owners, splits, reasons = schedule.owners, schedule.splits_backward, []
    waited_for = set()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            for one in needs(action, schedule.stages, splits):
                if one not in everything:
                    waited_for.add(one)
                    if one.stage != action.stage:
                        sender = owners.get(one.stage)
                        who = f"rank {sender}" if sender is not None else f"the rank of stage {one.stage}"
                        reasons.append(
                            f"missing send: rank {rank} waits in {action.words} for {who}, which has no {one.words}"
                        )
                    else:
                        reasons.append(f"rank {rank} has {action.words}, but no {KINDS[one.kind]} of it")
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            split = (stage, micro_batch) in splits
            for kind in "F" if forward_only else ("F", "I", "W") if split else ("F", "B"):
                wanted = Action(kind, micro_batch, stage)
                if wanted not in everything and wanted not in waited_for:
                    reasons.append(f"nobody runs {wanted.words}")
            if split and Action("B", micro_batch, stage) in everything:
                reasons.append(
                    f"{Action('B', micro_batch, stage).words} is there whole and in parts: give B, or I and W"
                )
    return reasons


def _deadlock(schedule: Schedule) -> list[str]:
    """Run it without time: where no rank can go on, they wait for each other."""
    splits, done, places = schedule.splits_backward, set[Action](), [0] * schedule.ranks
    going = True
    while going:
        going = False
        for rank, row in enumerate(schedule.rows):
            while places[rank] < len(row) and all(
                one in done for one in needs(row[places[rank]], schedule.stages, splits)
            ):
                done.add(row[places[rank]])
                places[rank] += 1
                going = True
    stuck = {rank: schedule.rows[rank][place] for rank, place in enumerate(places) if place < len(schedule.rows[rank])}
    if not stuck:
        return []
    owners, told = schedule.owners, []
    for rank, action in list(stuck.items())[:4]:
        one = next(one for one in needs(action, schedule.stages, splits) if one not in done)
        told.append(f"rank {rank} waits in {action.words} for rank {owners[one.stage]}'s {one.words}")
    return [f"deadlock: {'; '.join(told)}"]


def _too_many_alive(schedule: Schedule, most: int) -> list[str]:
    reasons = []
    for rank, row in enumerate(schedule.rows):
        over = [number for number, count in enumerate(schedule.alive(rank)) if count > most]
        if over:
            reasons.append(
                f"too many activations alive: rank {rank} keeps those of {schedule.peak_alive[rank]} micro-batches, "
                f"{most} are allowed, first exceeded by {row[over[0]].words}"
            )
    return reasons
