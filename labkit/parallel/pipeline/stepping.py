"""`PipelineSchedule`: an object that is given the stages and the loss, and whose `step` trains by any schedule."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from labkit.collectives.groups import endpoint
from labkit.parallel.pipeline.action_lists import Schedule
from labkit.parallel.pipeline.announcing import Announcement, announce, digest, hear, signature_of
from labkit.parallel.pipeline.buffers import Buffers
from labkit.parallel.pipeline.execution import Execution, Plan
from labkit.parallel.pipeline.legality import check_schedule
from labkit.parallel.pipeline.links import CONTROL_TAG, Begun
from labkit.parallel.pipeline.losses import Losses, SetAside, weight_of_all
from labkit.parallel.pipeline.micro_batches import cut, put_together, rows_in, sizes_of
from labkit.parallel.pipeline.stage import PipelineStage
from labkit.parallel.pipeline.tying import place_and_tie, sum_gradients


class PipelineSchedule:
    """Runs any schedule. The ranks of the pipeline build it together, and call `step` and `eval` together.

    Args:
        stages: this rank's stage, or a list of its stages.
        schedule: a Schedule, or a function from numbers of ranks and micro-batches to one. A fixed one needs a batch of
            as many rows as it has micro-batches; with a function a smaller batch makes fewer micro-batches.
        n_microbatches: into how many a batch is cut; not needed with a Schedule. They may be of unequal length.
        loss_fn: loss_fn(output, target), on the last stage. Without one there is no backward.
        scale_grads: whether a loss is the mean over its micro-batch; False where it is a sum, which is not divided.
        weighted: loss_fn returns (sum, weight), and the gradient is that of all sums over all weights.
        max_alive: refuse a schedule that keeps activations of more micro-batches on a rank at a time.

    An illegal schedule raises IllegalScheduleError here, before anything runs. After an exception in `step` or `eval`
    the others may wait for what never comes, so that the pipeline can't be called again.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        schedule: Schedule | Callable[[int, int], Schedule],
        n_microbatches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        scale_grads: bool = True,
        *,
        weighted: bool = False,
        max_alive: int | None = None,
    ) -> None:
        given = [stages] if isinstance(stages, PipelineStage) else stages
        if not isinstance(given, Sequence) or not given or not all(isinstance(one, PipelineStage) for one in given):
            raise TypeError(f"pipeline: stages is {stages!r:.80}; give this rank's PipelineStage, or a list of them")
        first = given[0]
        self.end, self.device, self.num_stages = first.end, first.device, first.num_stages
        self.stages = {stage.stage_index: stage for stage in given}
        wanted = range(first.group_rank, self.num_stages, first.group_size)
        if sorted(self.stages) != list(wanted):
            raise ValueError(
                f"pipeline: rank {first.group_rank} of {first.group_size} has the stages {list(wanted)} of "
                f"{self.num_stages}, but was given {sorted(self.stages)}: give all of them"
            )
        self.loss_fn, self.scale_grads, self.weighted, self.max_alive = loss_fn, scale_grads, weighted, max_alive
        if not isinstance(schedule, Schedule) and not callable(schedule):
            raise TypeError(
                f"pipeline: schedule is {schedule!r:.80}; give a Schedule, as Schedule.of([...]), or a function that "
                "makes one of the numbers of ranks and micro-batches"
            )
        self._schedule = schedule
        self._cuts = digest(first.cuts) if first.cuts else 0
        self._failed = ""
        if isinstance(schedule, Schedule):
            n_microbatches = n_microbatches or schedule.micro_batches
        if not isinstance(n_microbatches, int) or n_microbatches < 1:
            raise ValueError(f"pipeline: n_microbatches is {n_microbatches!r}; give 1 or more")
        self.n_microbatches = n_microbatches
        self._buffers = Buffers(self.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="labkit-pipeline")
        self._plans: dict[tuple[int, bool], Plan] = {}
        self._shapes: dict[tuple[int, bool], dict[Any, Any]] = {}
        self._plan(n_microbatches, training=True)
        self.parameters = list(dict.fromkeys(p for stage in given for p in stage.submodule.parameters()))
        tied = {parameter: stages for stage in given for parameter, stages in stage.tied.items()}
        self.ties = place_and_tie(self.parameters, tied, first.axis)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        weight: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of one batch; gradients add up in the parameters' `.grad`.

        Args:
            args: the whole batch, needed on the first stage's rank, not looked at on the others.
            target: needed on the last stage's rank.
            losses: on the last stage's rank it is filled with the loss of each micro-batch.
            return_outputs: whether the last stage's rank returns its output for the whole batch; others return None.
            weight: with `weighted`: the weight of the whole batch, on every rank, where it is known beforehand. It
                saves dividing at the end and one message.
            kwargs: further arguments of this rank's stages, cut like the batch.
        """
        if self.loss_fn is None:
            raise ValueError("pipeline: step needs a loss_fn; give one to the schedule, or call eval")
        if weight is not None and not (self.weighted and weight > 0):
            raise ValueError(f"pipeline: weight is {weight!r}; it needs weighted=True, and is above 0")
        if not torch.is_grad_enabled():
            raise RuntimeError("pipeline: step runs backward, so it can't be called under torch.no_grad(): call eval")
        deferred = self.weighted and weight is None
        aside = SetAside(self.parameters if deferred else [p for tie in self.ties for p in tie.parameters])
        statistics = [stage.statistics for stage in self.stages.values() if stage.statistics is not None]
        for one in statistics:
            one.begin()
        try:
            run = self._run(args, kwargs, target, training=True, keep_outputs=return_outputs, weight=weight)
        finally:
            for one in statistics:
                one.end()
        for tie in self.ties:
            sum_gradients(tie)
        total = 1.0
        if deferred:
            total = weight_of_all(self.end, run.losses.seen_weight if run.losses else 0.0, self.device)
        aside.put_back(divide_by=total or math.inf)
        if not total:
            raise ValueError(
                "pipeline: the weights of all micro-batches are 0, so that their mean loss is not defined: is every "
                "target one that is ignored?"
            )
        return self._finish(run, losses)

    def eval(self, *args: Any, target: Any = None, losses: list[Any] | None = None, **kwargs: Any) -> Any:
        """Forward only, without gradients; arguments and result as for `step`. Dropout and BatchNorm do what the
        modules' own mode says: call `.eval()` on them first."""
        with torch.no_grad():
            run = self._run(args, kwargs, target, training=False, keep_outputs=True, weight=None)
        return self._finish(run, losses)

    def _finish(self, run: Execution, losses: list[Any] | None) -> Any:
        if losses is not None and run.losses is not None:
            losses[:] = run.losses.values
        return put_together(run.outputs) if run.outputs else None

    def _run(
        self, args: Any, kwargs: Any, target: Any, *, training: bool, keep_outputs: bool, weight: float | None
    ) -> Execution:
        endpoint(self.end.group)  # refused where the ranks have been restarted
        if self._failed:
            raise RuntimeError(
                f"pipeline: a call before this one ended in {self._failed} on this rank, and the others may still wait "
                "for its messages: mend the cause and start anew"
            )
        lists = self._plan(self.n_microbatches, training=training).number
        mine = Announcement(0, 0, lists, int(training), int(weight is not None), self._cuts)
        told, sends = self._agree(args, mine)
        try:
            return self._execute(args, kwargs, target, told, sends, training, keep_outputs, weight)
        except BaseException as error:
            self._failed = type(error).__name__
            raise

    def _execute(
        self,
        args: Any,
        kwargs: Any,
        target: Any,
        told: Announcement,
        sends: list[Any],
        training: bool,
        keep_outputs: bool,
        weight: float | None,
    ) -> Execution:
        plan = self._plan(min(self.n_microbatches, told.rows), training=training)
        sizes = sizes_of(told.rows, plan.schedule.micro_batches)
        if len(sizes) < plan.schedule.micro_batches:
            raise ValueError(
                f"pipeline: a batch of {told.rows} rows can't be cut into {plan.schedule.micro_batches} micro-batches, "
                "which this schedule has: give a larger batch"
            )
        last, loss = self.stages.get(self.num_stages - 1), None
        if last is not None and self.loss_fn is not None and (training or target is not None):
            if target is None:
                raise ValueError("pipeline: the rank of the last stage needs the target; give target=")
            loss = Losses(self.loss_fn, sizes, weighted=self.weighted, weight=weight, scale=self.scale_grads)
        run = Execution(
            self.stages,
            plan,
            self.end,
            sizes,
            self._shapes.setdefault((told.signature, training), {}),
            self._buffers,
            self._thread,
            (
                cut(args, sizes, "an argument") if 0 in self.stages else [],
                cut(kwargs, sizes, "a keyword argument"),
                cut(target, sizes, "the target") if loss is not None else [],
            ),
            loss,
            training=training,
            keep_outputs=keep_outputs,
        )
        run.links.sends.extend(map(Begun, sends))
        run.run()
        return run

    def _agree(self, args: Any, mine: Announcement) -> tuple[Announcement, list[Any]]:
        first = 0  # stage 0 is the group's first rank's
        if 0 not in self.stages:
            told = hear(self.end, first, CONTROL_TAG)
            mine.check(told, self.end.members[self.end.place], self.end.members[first])
            return told, []
        rows = rows_in(args)
        if not rows:
            raise ValueError(
                "pipeline: the rank of the first stage needs the batch: give tensors with at least one row"
            )
        told = mine._replace(rows=rows, signature=digest(signature_of(args)))
        return told, announce(self.end, told, CONTROL_TAG)

    def _plan(self, micro_batches: int, *, training: bool) -> Plan:
        key = (micro_batches, training)
        if key not in self._plans:
            made = self._schedule
            schedule = made if isinstance(made, Schedule) else made(self.end.size, micro_batches)
            if not isinstance(schedule, Schedule):
                raise TypeError(
                    f"pipeline: the function that makes the schedule returned a {type(schedule).__name__}: return a "
                    "Schedule, as Schedule.of([...])"
                )
            schedule = schedule if training else schedule.forward_only()
            check_schedule(
                schedule,
                ranks=self.end.size,
                stages=self.num_stages,
                max_alive=self.max_alive,
                forward_only=not training or self.loss_fn is None,
            )
            for stage, owner in schedule.owners.items():
                if owner != stage % self.end.size:
                    raise ValueError(
                        f"schedule {schedule.name!r}: stage {stage} is on rank {owner}; stage s is on rank s modulo "
                        f"{self.end.size} here"
                    )
            self._plans[key] = Plan(schedule, self.end.place)
        return self._plans[key]
