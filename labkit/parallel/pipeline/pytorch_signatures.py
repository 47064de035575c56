"""The known schedules as PyTorch offers them: each a class with PyTorch's arguments."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from labkit.parallel.pipeline.action_lists import Schedule
from labkit.parallel.pipeline.known_schedules import gpipe, interleaved, naive, one_f_one_b, zb_h1
from labkit.parallel.pipeline.stage import PipelineStage
from labkit.parallel.pipeline.stepping import PipelineSchedule


def _refuse_specs(**specs: Any) -> None:
    for name, value in specs.items():
        if value is not None:
            raise ValueError(f"pipeline: {name} is not supported: batches are cut, and outputs joined, along dim 0")


class _OneStage(PipelineSchedule):
    """A schedule for one stage a rank, with PyTorch's signature."""

    _known: Callable[[int, int], Schedule]

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        weighted: bool = False,
        max_alive: int | None = None,
    ) -> None:
        _refuse_specs(
            args_chunk_spec=args_chunk_spec, kwargs_chunk_spec=kwargs_chunk_spec, output_merge_spec=output_merge_spec
        )
        known = type(self)._known
        super().__init__(stage, known, n_microbatches, loss_fn, scale_grads, weighted=weighted, max_alive=max_alive)


class ScheduleNaive(_OneStage):
    """One stage at a time; see `naive`. Arguments as for `PipelineSchedule`."""

    _known = staticmethod(naive)


class ScheduleGPipe(_OneStage):
    """All forwards, then all backwards; see `gpipe`. Arguments as for `PipelineSchedule`."""

    _known = staticmethod(gpipe)


class Schedule1F1B(_OneStage):
    """A forward and a backward in turns; see `one_f_one_b`. Arguments as for `PipelineSchedule`."""

    _known = staticmethod(one_f_one_b)


class ScheduleZBH1(_OneStage):
    """1F1B with the backward in two; see `zb_h1`. Arguments as for `PipelineSchedule`."""

    _known = staticmethod(zb_h1)


class ScheduleInterleaved1F1B(PipelineSchedule):
    """1F1B with several stages a rank; see `interleaved`. Arguments as for `PipelineSchedule`."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        weighted: bool = False,
        max_alive: int | None = None,
    ) -> None:
        _refuse_specs(
            args_chunk_spec=args_chunk_spec, kwargs_chunk_spec=kwargs_chunk_spec, output_merge_spec=output_merge_spec
        )
        known = partial(interleaved, chunks=len(stages))
        super().__init__(stages, known, n_microbatches, loss_fn, scale_grads, weighted=weighted, max_alive=max_alive)
