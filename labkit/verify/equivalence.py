"""`assert_equivalent`: a parallel implementation against the truth in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit.ranks import Ranks
from labkit.verify.causes import likely_cause
from labkit.verify.courses import KINDS, WORDS, Build, Course, Loss, MakeOptimizer, Named, Task, default_dtype
from labkit.verify.differences import TOLERANCES, Difference, compare, table
from labkit.verify.failure import Cause, Failure
from labkit.verify.nearness import near
from labkit.verify.splitting import even_sizes, rows_of, to_dtype
from labkit.verify.taking_part import Parallelize, forget, hand_over, take_part
from labkit.verify.truth import run_truth


class NotEquivalentError(AssertionError):
    """The parallel implementation differs from the truth. `kind` says in what first, `differences` holds all of that
    kind that are too large, `cause` is None or has `name` and `sentence`."""

    def __init__(self, message: str, kind: str, cause: Cause | None, differences: Sequence[Difference]) -> None:
        super().__init__(message)
        self.kind, self.cause, self.differences = kind, cause, list(differences)


@dataclass(frozen=True)
class Equivalence:
    """What was shown equal. `errors` has the largest difference of each kind, such as "weights"; `identical` says
    whether all ranks have the same weights to the last bit."""

    world_size: int
    steps: int
    dtype: torch.dtype
    reference: str
    errors: Mapping[str, float]
    identical: bool

    def __str__(self) -> str:
        told = ", ".join(f"{kind.replace('_', ' ')} {error:.2g}" for kind, error in self.errors.items())
        dtype = str(self.dtype).removeprefix("torch.")
        return f"equal to one process ({self.world_size} ranks, {dtype}, {self.steps} steps); differences: {told}"


def assert_equivalent(
    build: Build,
    batch: tuple[Any, Any],
    loss: Loss,
    parallelize: Parallelize,
    world_size: int,
    optimizer: MakeOptimizer,
    *,
    steps: int = 3,
    reference: str = "whole",
    dtype: torch.dtype = torch.float32,
    shares: Sequence[int] | None = None,
    micro_batches: int = 1,
    start: str = "same",
    seed: int = 0,
    ranks: Ranks | None = None,
) -> Equivalence:
    """Train `steps` steps on ranks and in one process, and compare gradients, weights and buffers.

    It starts the ranks itself. float32 must agree within rtol 1.3e-6 and atol 1e-5, float64 within 1e-9.

    Args:
        build: returns the module, the same for the same seed of torch's random numbers. New tensors in it get `dtype`.
        batch: (inputs, targets), the whole batch, the first dim the samples; floating-point tensors get `dtype`.
        loss: loss(output, targets) returns the sum and its weight, the number of samples or valid tokens.
        parallelize: parallelize(module, loss, optimizer), called on every rank. It returns an object with
            step(inputs, targets) on the whole batch, full_grads() and full_params() by original name (a rank may leave
            out what it lacks if another has it; full_buffers() is optional); or a wrapped module, or a pair of module
            and optimizer, and the harness cuts the batch, weighs the loss and multiplies it by the number of ranks.
        world_size: the number of ranks.
        optimizer: optimizer(parameters) returns the optimizer.
        steps: how many steps, all on the same batch.
        reference: "whole" compares with the whole batch in one process, "replay" with one process that replays every
            rank's share with the rank's own batch statistics and dropout masks.
        dtype: torch.float32 or torch.float64.
        shares: the rows of each rank's share; even ones, the longer first, where not given.
        micro_batches: into how many parts step() cuts a rank's share: a replay does so too.
        start: "same" builds the same module on every rank; "rank0" builds others on the other ranks, so that rank 0's
            parameters and buffers must be broadcast.
        seed: of the starting weights and of each rank's random numbers in each step.
        ranks: running ranks to use, `world_size` of them.

    Raises `NotEquivalentError`, an AssertionError with a table of the worst offenders and a likely cause, and
    `RankError` where a rank fails.
    """
    inputs, targets = batch
    _refuse_bad(world_size, steps, reference, dtype, shares, micro_batches, start, rows_of(inputs))
    sizes = list(shares) if shares is not None else even_sizes(rows_of(inputs), world_size)
    task = Task(
        build,
        to_dtype(inputs, dtype),
        to_dtype(targets, dtype),
        loss,
        optimizer,
        sizes,
        micro_batches,
        steps,
        dtype,
        seed,
    )
    with torch.random.fork_rng(devices=[]), default_dtype(dtype):
        truth, buffers = run_truth(task, reference)
    if ranks is None:
        with Ranks(world_size) as own:
            courses, identical = _on_ranks(own, task, parallelize, start)
    elif ranks.world_size == world_size:
        courses, identical = _on_ranks(ranks, task, parallelize, start)
    else:
        raise ValueError(f"assert_equivalent: world_size is {world_size} but there are {ranks.world_size} ranks")
    return _judge(task, reference, truth, buffers, courses, identical)


def _on_ranks(ranks: Ranks, task: Task, parallelize: Parallelize, start: str) -> tuple[list[Course], bool]:
    """Every rank's course. What is the same to the last bit is sent once."""
    digests = ranks.run(take_part, task, parallelize, start)
    first = {kind: [[one[kind] for one in digests].index(own[kind]) for own in digests] for kind in KINDS}
    handed = ranks.run(hand_over, {kind: set(places) for kind, places in first.items()})
    ranks.run(forget)
    courses = [Course(**{kind: handed[first[kind][rank]][kind] for kind in KINDS}) for rank in range(ranks.world_size)]
    return courses, len(set(first["weights"])) == 1


def _judge(
    task: Task, reference: str, truth: Course, buffers: Sequence[Named], courses: Sequence[Course], identical: bool
) -> Equivalence:
    kinds = {value.dtype for value in truth.start.values() if value is not None and value.is_floating_point()}
    rtol, atol = max((TOLERANCES[kind] for kind in kinds | {task.dtype} if kind in TOLERANCES), key=lambda one: one[1])
    errors: dict[str, float] = {}
    bad: dict[str, list[Difference]] = {}
    for kind in KINDS:
        ours = [getattr(course, kind) for course in courses]
        if all(one is None for one in ours):
            continue
        true: list[Named] = [getattr(truth, kind)] * task.world_size
        if kind == "buffers":
            true = [_expected(mine, buffers[0], buffers[rank]) for rank, mine in enumerate(ours)]
        found = compare(ours, true, rtol, atol)
        errors[kind] = max((one.error for one in found), default=0.0)
        if any(one.bad for one in found):
            bad[kind] = [one for one in found if one.bad]
    if not bad:
        return Equivalence(task.world_size, task.steps, task.dtype, reference, errors, identical)
    kind = next(iter(bad))
    cause = likely_cause(Failure(task, courses, truth, reference, kind, bad[kind]))
    raise NotEquivalentError(_message(task, reference, bad, cause), kind, cause, bad[kind])


def _expected(mine: Named | None, of_rank0: Named, own: Named) -> Named:
    """Rank 0's buffers, or what this rank's share makes of them in the last step: both are synchronised."""
    if mine is not None and all(near(mine.get(name), value) for name, value in of_rank0.items()):
        return of_rank0
    return own


def _message(task: Task, reference: str, bad: Mapping[str, Sequence[Difference]], cause: Cause | None) -> str:
    kind = next(iter(bad))
    what = WORDS[kind].format(steps=task.steps)
    against = "on the whole batch" if reference == "whole" else "that replays the ranks' shares"
    dtype = str(task.dtype).removeprefix("torch.")
    lines = [
        f"{what} differ from one process {against} ({task.world_size} ranks, {dtype}):",
        table(bad[kind], task.world_size),
    ]
    if others := [WORDS[other].format(steps=task.steps) for other in list(bad)[1:]]:
        lines.append(f"  {' and '.join(others)} differ too")
    lines.append(f"Likely cause: {cause.sentence}." if cause else "The cause is none of the known mistakes.")
    return "\n".join(lines)


def _refuse_bad(
    world_size: Any, steps: Any, reference: str, dtype: Any, shares: Any, micro_batches: Any, start: str, rows: int
) -> None:
    def refuse(words: str) -> None:
        raise ValueError(f"assert_equivalent: {words}")

    if not isinstance(world_size, int) or world_size < 1:
        refuse(f"world_size is {world_size!r}; give a number of ranks from 1")
    if not isinstance(steps, int) or steps < 1:
        refuse(f"steps is {steps!r}; give 1 or more")
    if reference not in ("whole", "replay"):
        refuse(f"reference is {reference!r}; give 'whole' or 'replay'")
    if dtype not in (torch.float32, torch.float64):
        refuse(f"dtype is {dtype!r}; give torch.float32 or torch.float64")
    if not isinstance(micro_batches, int) or micro_batches < 1:
        refuse(f"micro_batches is {micro_batches!r}; give 1 or more")
    if start not in ("same", "rank0"):
        refuse(f"start is {start!r}; give 'same' or 'rank0'")
    if shares is not None and (len(shares) != world_size or sum(shares) != rows):
        refuse(f"shares is {list(shares)}; give {world_size} numbers of rows that add up to the batch's {rows}")
