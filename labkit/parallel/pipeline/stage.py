"""`PipelineStage`: one stage's module, and where it stands in the pipeline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from labkit.collectives.groups import endpoint
from labkit.mesh import as_axis
from labkit.mesh.axes import AxisLike
from labkit.parallel.pipeline.deferred_statistics import DeferredStatistics


class PipelineStage:
    """Stage `stage_index` of `num_stages`, on this rank. Stage s belongs to the group's rank s modulo its size.

    Args:
        submodule: called with what the stage before returned, a tensor or a tuple of them as its arguments; it returns
            the same. The first stage takes what `step` is given, the last may return anything that its loss takes.
        stage_index, num_stages: its place.
        device: where the submodule is moved to, and where what arrives is put.
        input_args, output_args, output_grads, input_grads: taken for PyTorch's sake and not needed: stages exchange
            shapes in the first step.
        group: the ranks of the pipeline: a group, an axis of a mesh, None for the world.
        tied: parameters that other stages hold too, each with the stages. `split_model` finds them.
        checkpoint: calls the submodule in its own way, `checkpoint(submodule, *inputs)`, and may leave out what
            backward needs and compute it again then: of a micro-batch only the stage's inputs stay alive.
        deferred_batch_norm: GPipe's rule: running statistics are updated once a step, from all its micro-batches.
            Otherwise once a micro-batch, as in PyTorch. In both cases each micro-batch is normalised by its own.

    Dropout masks come from this rank's own random numbers, in the order of its micro-batches.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: AxisLike = None,
        *,
        tied: Mapping[Parameter, Sequence[int]] | None = None,
        checkpoint: Callable[..., Any] | None = None,
        deferred_batch_norm: bool = False,
    ) -> None:
        if not isinstance(submodule, nn.Module):
            raise TypeError(f"PipelineStage: submodule is a {type(submodule).__name__}; give an nn.Module")
        self.axis = as_axis(group)
        self.end = endpoint(self.axis.group)
        self.group_rank, self.group_size = self.end.place, self.end.size
        if self.end.nccl and self.group_size > 1:
            # receives posted ahead and sends of one pair wait for each other in one stream there
            raise ValueError("PipelineStage: pipelines over nccl are not available yet; use a group of gloo")
        if not isinstance(num_stages, int) or num_stages < 1 or num_stages % self.group_size:
            raise ValueError(
                f"PipelineStage: num_stages is {num_stages!r}, but the pipeline has {self.group_size} ranks: give a "
                "multiple of them, the same number of stages on each"
            )
        if not isinstance(stage_index, int) or not 0 <= stage_index < num_stages:
            raise ValueError(f"PipelineStage: stage_index is {stage_index!r}; give 0 to {num_stages - 1}")
        if stage_index % self.group_size != self.group_rank:
            raise ValueError(
                f"PipelineStage: stage {stage_index} belongs to rank {stage_index % self.group_size} of the pipeline, "
                f"not to rank {self.group_rank}: rank r has the stages r, r + {self.group_size}, ..."
            )
        self.device = torch.device(device)
        self.submodule = submodule.to(self.device)
        self.stage_index, self.num_stages = stage_index, num_stages
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.checkpoint = checkpoint
        self.cuts: tuple[int, ...] = ()  # the steps and cuts of the split that it comes from
        self.tied = dict(tied or {})
        self.statistics = DeferredStatistics(submodule) if deferred_batch_norm else None

    def forward(self, inputs: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool) -> Any:
        """What the submodule returns; through `checkpoint` where there will be a backward."""
        if self.statistics is not None:
            self.statistics.counting = training
        try:
            if self.checkpoint is not None and training:
                return self.checkpoint(self.submodule, *inputs, **kwargs)
            return self.submodule(*inputs, **kwargs)
        finally:
            if self.statistics is not None:
                self.statistics.counting = False
