"""What lies between the shared layers, on shards: of the sequence, of the channels, and where shards begin and end.

Source: Korthikanti and others, Reducing Activation Recomputation in Large Transformer Models (2022), arXiv:2205.05198,
section 4.2.2, figure 5. Norms and dropout work on each token alone, so that each rank may take some of the tokens; the
all-reduce around them falls apart into a reduce-scatter before and an all-gather behind, of the same bytes.
"""

from functools import partial
from typing import Any

from torch import nn

from labkit.mesh import Axis, placement_of
from labkit.parallel.tensor.conjugates import gather_out
from labkit.parallel.tensor.layers import SequenceLayerNorm, SequenceRMSNorm, become
from labkit.parallel.tensor.layouts import Replicate, Shard, as_layout
from labkit.parallel.tensor.linear_styles import refuse_dtensors
from labkit.parallel.tensor.random_streams import ShardedDropout
from labkit.parallel.tensor.styles import (
    Changed,
    Cut,
    Entering,
    EvenShard,
    ParallelStyle,
    cut_if_there,
    does_not_fit,
)


class SequenceParallel(ParallelStyle):
    """An nn.LayerNorm, nn.RMSNorm or nn.Dropout that is called on this rank's shard of the tokens.

    A norm's parameters stay whole; their gradients are summed over the ranks. Dropout draws each rank's own mask.
    `sequence_dim` and `use_local_output` are as in PyTorch: shards come in and go out.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        self.sequence_dim = sequence_dim
        refuse_dtensors("SequenceParallel", use_local_output)

    def cuts(self, module: nn.Module, name: str, axis: Axis) -> list[Cut]:
        if not isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.Dropout):
            raise does_not_fit(self, module, name, "nn.LayerNorm, nn.RMSNorm and nn.Dropout")
        return []

    def install(self, module: nn.Module, axis: Axis) -> None:
        if isinstance(module, nn.Dropout):
            become(module, ShardedDropout, axis=axis)
        else:
            become(module, SequenceLayerNorm if isinstance(module, nn.LayerNorm) else SequenceRMSNorm, axis=axis)


class DropoutParallel(ParallelStyle):
    """An nn.Dropout on shards of any dim: each rank draws its own mask."""

    def cuts(self, module: nn.Module, name: str, axis: Axis) -> list[Cut]:
        if not isinstance(module, nn.Dropout):
            raise does_not_fit(self, module, name, "nn.Dropout")
        return []

    def install(self, module: nn.Module, axis: Axis) -> None:
        become(module, ShardedDropout, axis=axis)


class ChannelParallel(ParallelStyle):
    """A norm behind a convolution that is cut by columns: BatchNorm and GroupNorm on a part of the channels.

    Each channel, or group of channels, is normalised by itself, so that nothing is sent. The groups must divide.
    """

    def cuts(self, module: nn.Module, name: str, axis: Axis) -> list[Cut]:
        names = {"weight": 0, "bias": 0}
        if isinstance(module, nn.GroupNorm):
            if module.num_groups % axis.size:
                raise ValueError(
                    f"ChannelParallel: {name} has {module.num_groups} groups, which can't be shared out evenly among "
                    f"{axis.size} ranks: give a number of ranks that divides {module.num_groups}"
                )
        elif type(module) is nn.BatchNorm2d:  # a synchronised one would meet the other ranks' channels
            names |= {"running_mean": 0, "running_var": 0}
        else:
            raise does_not_fit(self, module, name, "nn.BatchNorm2d and nn.GroupNorm")
        return cut_if_there(module, names)

    def install(self, module: nn.Module, axis: Axis) -> None:
        if isinstance(module, nn.GroupNorm):
            module.num_groups //= axis.size
            module.num_channels //= axis.size
        elif isinstance(module, nn.BatchNorm2d):
            each, more = divmod(module.num_features, axis.size)
            module.num_features = each + (axis.coordinate < more)


class VocabParallelHead(ParallelStyle):
    """A head that multiplies with the embedding's own matrix, behind a norm: logits [..., V / N] of this rank's tokens.

    Take the loss of such logits within `loss_parallel`. The norm's output enters the product.

    Args:
        input_layouts: how the norm's output lies: Replicate() (the default), or Shard(dim) of the sequence.
        output_layouts: shards of the vocabulary (the default), or Replicate(): the logits are gathered.
        weight, norm: the names of the matrix [V, d] and of the norm in front of it.
    """

    def __init__(
        self, *, input_layouts: Any = None, output_layouts: Any = None, weight: str = "weight", norm: str = "norm"
    ) -> None:
        self.input = as_layout(input_layouts, Replicate(), "VocabParallelHead: input_layouts")
        self.output = as_layout(output_layouts, Shard(-1), "VocabParallelHead: output_layouts")
        if isinstance(self.output, Shard) and self.output.dim != -1:
            raise ValueError("VocabParallelHead puts out shards of the vocabulary, Shard(-1), or Replicate()")
        self.weight, self.norm = weight, norm

    def cuts(self, module: nn.Module, name: str, axis: Axis) -> list[Cut]:
        weight, norm = getattr(module, self.weight, None), getattr(module, self.norm, None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not isinstance(norm, nn.Module):
            raise does_not_fit(self, module, name, f"a head with a matrix {self.weight} and a module {self.norm}")
        return [Cut(module, self.weight, 0)]

    def install(self, module: nn.Module, axis: Axis) -> None:
        module.get_submodule(self.norm).register_forward_hook(Entering(self.input, "gathered", axis).after)
        if isinstance(self.output, Replicate):
            total = placement_of(module.get_parameter(self.weight)).shape[0]
            module.register_forward_hook(Changed(partial(gather_out, dim=-1, group=axis, total=total)).after)


class ScatterOutput(ParallelStyle):
    """Each rank goes on with its shard of what a module puts out, along `dim`; its length must divide."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def install(self, module: nn.Module, axis: Axis) -> None:
        module.register_forward_hook(Changed(EvenShard(self.dim, axis)).after)


class GatherInput(ParallelStyle):
    """A module that stays replicated is given the whole of a first argument that lies in shards along `dim`."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def install(self, module: nn.Module, axis: Axis) -> None:
        module.register_forward_pre_hook(Changed(partial(gather_out, dim=self.dim, group=axis)).before)
