"""Attention by heads: query, key and value by columns, a rank's columns being whole heads, the output by rows.

Source: Shoeybi and others, Megatron-LM (2019), arXiv:1909.08053, section 3, figure 3b.
"""

from typing import Any

from torch import nn

from labkit.mesh import Axis
from labkit.parallel.tensor.layouts import Replicate, Shard, as_layout
from labkit.parallel.tensor.linear_styles import by_columns, by_rows, refuse_dtensors
from labkit.parallel.tensor.random_streams import OwnNumbers
from labkit.parallel.tensor.styles import Cut, Entering, ParallelStyle, checked_keep, cut_if_there, does_not_fit


class AttentionParallel(ParallelStyle):
    """Share out the heads of an attention module, which counts its heads by the width of its projections.

    The module has `head_dim` and four linear layers; its first argument enters once for query, key and value. Grouped
    queries work too: key and value have fewer heads, which must divide as well. Dropout of the attention weights draws
    each rank's own numbers.

    Args:
        input_layouts: Replicate() (the default), or Shard(dim) of the sequence: it is gathered.
        output_layouts: Replicate() (the default), or Shard(dim): reduce-scattered.
        use_local_output: as in PyTorch, where outputs may be DTensors; ours are local tensors always.
        keep: of a gathered input, keep the "gathered" tensor for backward, or only the "shards".
        pieces: as for `RowwiseParallel`, of the output layer.
        query, key, value, out: the names of the linear layers.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
        keep: str = "gathered",
        pieces: int = 1,
        query: str = "query",
        key: str = "key",
        value: str = "value",
        out: str = "out",
    ) -> None:
        self.input = as_layout(input_layouts, Replicate(), "AttentionParallel: input_layouts")
        self.output = as_layout(output_layouts, Replicate(), "AttentionParallel: output_layouts")
        self.keep, self.pieces, self.columns, self.row = checked_keep(keep), pieces, (query, key, value), out
        if pieces > 1 and isinstance(self.output, Shard):
            raise ValueError("AttentionParallel: only an all-reduce goes in pieces; give output_layouts=Replicate()")
        refuse_dtensors("AttentionParallel", use_local_output)

    def cuts(self, module: nn.Module, name: str, axis: Axis) -> list[Cut]:
        head_dim = getattr(module, "head_dim", None)
        layers = [getattr(module, one, None) for one in (*self.columns, self.row)]
        if not isinstance(head_dim, int) or not all(isinstance(layer, nn.Linear) for layer in layers):
            takes = f"a module with head_dim and the linear layers {', '.join((*self.columns, self.row))}"
            raise does_not_fit(self, module, name, takes)
        found: list[Cut] = []
        for column, layer in zip(self.columns, layers, strict=False):
            assert isinstance(layer, nn.Linear)
            check_heads(f"{name}.{column}", layer, head_dim, axis)
            found += cut_if_there(layer, {"weight": 0, "bias": 0})
        row = layers[-1]
        assert isinstance(row, nn.Linear)
        return [*found, Cut(row, "weight", 1)]

    def install(self, module: nn.Module, axis: Axis) -> None:
        module.register_forward_pre_hook(Entering(self.input, self.keep, axis))
        for column in self.columns:
            by_columns(module.get_submodule(column))
        by_rows(module.get_submodule(self.row), axis, self.output, self.pieces)
        numbers = OwnNumbers(axis)
        module.register_forward_pre_hook(numbers.before)
        module.register_forward_hook(numbers.after, always_call=True)


def check_heads(name: str, layer: nn.Linear, head_dim: int, axis: Axis) -> None:
    """Raise ValueError where the layer's outputs, `head_dim` for each head, can't be cut into whole heads."""
    heads = layer.out_features // head_dim
    if heads % axis.size:
        raise ValueError(
            f"parallelize_module: {name} has {heads} heads, which can't be shared out evenly among {axis.size} ranks: "
            f"give a number of ranks that divides {heads}"
        )
