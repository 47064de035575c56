"""Linear layers and convolutions by columns (outputs) and by rows (inputs).

Source: Shoeybi and others, Megatron-LM (2019), arXiv:1909.08053, section 3, figure 3. Y = X [A1 A2] needs no sum, and
[X1 X2] [A1; A2] = X1 A1 + X2 A2 needs one. Columns, then rows, with what works on each feature alone between them,
need one all-reduce for both.
"""

from functools import partial
from typing import Any

from torch import nn

from labkit.mesh import Axis
from labkit.parallel.tensor.conjugates import gather_out, scatter_in
from labkit.parallel.tensor.layers import ColumnLinear, RowConv2d, RowLinear, VocabularyEmbedding, become
from labkit.parallel.tensor.layouts import Replicate, Shard, as_layout
from labkit.parallel.tensor.styles import (
    Changed,
    Cut,
    Entering,
    ParallelStyle,
    checked_keep,
    cut_if_there,
    does_not_fit,
    features,
)


class ColwiseParallel(ParallelStyle):
    """Cut an nn.Linear by its outputs, or an nn.Conv2d by its output channels, weight and bias.

    Args:
        input_layouts: Replicate() (the default), or Shard(dim) of another dim than the features, such as the sequence:
            it is gathered.
        output_layouts: shards of the features (the default, Shard(-1); Shard(1) for images), or Replicate(): gathered.
        use_local_output: as in PyTorch, where outputs may be DTensors; ours are local tensors always.
        keep: of a gathered input, keep the "gathered" tensor for backward, or only the "shards".

    Outputs that don't divide are shared out in parts that differ by one.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
        keep: str = "gathered",
    ) -> None:
        self.input = as_layout(input_layouts, Replicate(), "ColwiseParallel: input_layouts")
        self.output = output_layouts and as_layout(output_layouts, Replicate(), "ColwiseParallel: output_layouts")
        self.keep = checked_keep(keep)
        refuse_dtensors("ColwiseParallel", use_local_output)

    def cuts(self, module: nn.Module, name: str, axis: Axis) -> list[Cut]:
        if not isinstance(module, nn.Linear | nn.Conv2d):
            raise does_not_fit(self, module, name, "nn.Linear and nn.Conv2d")
        refuse_groups(self, module, name)
        if features(self.input, module):
            raise ValueError(f"ColwiseParallel: {name} can't take shards of its features: give Replicate()")
        if isinstance(self.output, Shard) and not features(self.output, module):
            raise ValueError(f"ColwiseParallel: {name} puts out shards of its features, or Replicate()")
        outputs = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        if outputs < axis.size:
            raise ValueError(f"ColwiseParallel: {name} has {outputs} outputs, fewer than the {axis.size} ranks")
        return cut_if_there(module, {"weight": 0, "bias": 0})

    def install(self, module: nn.Module, axis: Axis) -> None:
        module.register_forward_pre_hook(Entering(self.input, self.keep, axis))
        if isinstance(self.output, Replicate):
            dim = 1 if isinstance(module, nn.Conv2d) else -1
            total: Any = module.out_channels if isinstance(module, nn.Conv2d) else module.out_features
            whole = partial(gather_out, dim=dim, group=axis, total=total)
            module.register_forward_hook(Changed(whole).after)
        by_columns(module)


class RowwiseParallel(ParallelStyle):
    """Cut an nn.Linear by its inputs, or an nn.Conv2d by its input channels; each bias is added once, after the sum.

    An nn.Embedding is cut by its rows, as by `VocabParallelEmbedding`.

    Args:
        input_layouts: shards of the features (the default), or Replicate(), of which each rank takes its part.
        output_layouts: Replicate() (the default), or Shard(dim): reduce-scattered.
        use_local_output: as in PyTorch, where outputs may be DTensors; ours are local tensors always.
        pieces: into how many pieces an nn.Linear cuts its product, so that the sum of one hides behind the next.
    """

    def __init__(
        self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True, pieces: int = 1
    ) -> None:
        self.input = input_layouts and as_layout(input_layouts, Replicate(), "RowwiseParallel: input_layouts")
        self.output = as_layout(output_layouts, Replicate(), "RowwiseParallel: output_layouts")
        if not isinstance(pieces, int) or pieces < 1:
            raise ValueError(f"RowwiseParallel: pieces is {pieces!r}; give 1 or more")
        if pieces > 1 and isinstance(self.output, Shard):
            raise ValueError("RowwiseParallel: only an all-reduce goes in pieces; give output_layouts=Replicate()")
        self.pieces = pieces
        refuse_dtensors("RowwiseParallel", use_local_output)

    def cuts(self, module: nn.Module, name: str, axis: Axis) -> list[Cut]:
        if isinstance(module, nn.Embedding):
            return VocabParallelEmbedding(output_layouts=self.output).cuts(module, name, axis)
        if not isinstance(module, nn.Linear | nn.Conv2d):
            raise does_not_fit(self, module, name, "nn.Linear, nn.Conv2d and nn.Embedding")
        refuse_groups(self, module, name)
        if isinstance(self.input, Shard) and not features(self.input, module):
            raise ValueError(f"RowwiseParallel: {name} takes shards of its features, or Replicate()")
        inputs = module.in_features if isinstance(module, nn.Linear) else module.in_channels
        if inputs < axis.size:
            raise ValueError(f"RowwiseParallel: {name} has {inputs} inputs, fewer than the {axis.size} ranks")
        return [Cut(module, "weight", 1)]

    def install(self, module: nn.Module, axis: Axis) -> None:
        if isinstance(module, nn.Embedding):
            VocabParallelEmbedding(output_layouts=self.output).install(module, axis)
            return
        if isinstance(self.input, Replicate):
            part = partial(scatter_in, dim=1 if isinstance(module, nn.Conv2d) else -1, group=axis)
            module.register_forward_pre_hook(Changed(part).before)
        by_rows(module, axis, self.output, self.pieces)


class VocabParallelEmbedding(ParallelStyle):
    """Cut an nn.Embedding by its rows: each rank looks up the tokens it has, and a sum joins the vectors.

    A tied head is cut with it; give it `VocabParallelHead`. A vocabulary that doesn't divide is shared out in parts
    that differ by one.

    Args:
        input_layouts, use_local_output: as in PyTorch; token ids are replicated and vectors local tensors always.
        output_layouts: Replicate() (the default), or Shard(dim): reduce-scattered.
    """

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        if isinstance(as_layout(input_layouts, Replicate(), "VocabParallelEmbedding: input_layouts"), Shard):
            raise ValueError("VocabParallelEmbedding: every rank needs all token ids; give input_layouts=Replicate()")
        self.output = as_layout(output_layouts, Replicate(), "VocabParallelEmbedding: output_layouts")
        refuse_dtensors("VocabParallelEmbedding", use_local_output)

    def cuts(self, module: nn.Module, name: str, axis: Axis) -> list[Cut]:
        if not isinstance(module, nn.Embedding):
            raise does_not_fit(self, module, name, "nn.Embedding")
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise ValueError(
                f"VocabParallelEmbedding: {name} has max_norm, sparse or scale_grad_by_freq: leave them out"
            )
        return [Cut(module, "weight", 0)]

    def install(self, module: nn.Module, axis: Axis) -> None:
        count = int(module.num_embeddings)  # type: ignore[arg-type]
        become(module, VocabularyEmbedding, axis=axis, layout=self.output, first=_first_of(count, axis))


def _first_of(count: int, axis: Axis) -> int:
    """The first of `count` rows that this rank has."""
    each, more = divmod(count, axis.size)
    return each * axis.coordinate + min(axis.coordinate, more)


def by_columns(module: nn.Module) -> None:
    """A layer whose outputs are cut, as the one it is now."""
    assert isinstance(module.weight, nn.Parameter)
    if isinstance(module, nn.Conv2d):
        module.out_channels = len(module.weight)
    else:
        become(module, ColumnLinear, out_features=len(module.weight))


def by_rows(module: nn.Module, axis: Axis, layout: Any, pieces: int = 1) -> None:
    """A layer whose inputs are cut, as the one it is now."""
    assert isinstance(module.weight, nn.Parameter)
    if isinstance(module, nn.Conv2d):
        become(module, RowConv2d, in_channels=module.weight.shape[1], axis=axis, layout=layout)
    else:
        become(module, RowLinear, in_features=module.weight.shape[1], axis=axis, layout=layout, pieces=pieces)


def refuse_groups(style: ParallelStyle, module: nn.Module, name: str) -> None:
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        raise ValueError(f"{type(style).__name__}: {name} has groups={module.groups}; only groups=1 can be cut")


def refuse_dtensors(style: str, use_local_output: bool) -> None:
    if not use_local_output:
        raise ValueError(f"{style}: use_local_output=False asks for a DTensor; labkit works on local tensors")
