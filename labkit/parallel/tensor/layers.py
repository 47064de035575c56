"""Layers that hold a slice of their weight. A layer of the model becomes one of them in place, by its class."""

from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from labkit.mesh import Axis
from labkit.parallel.tensor.conjugates import reduce_out, scatter_out
from labkit.parallel.tensor.kept_shards import keeping
from labkit.parallel.tensor.layouts import Layout, Replicate, Shard
from labkit.parallel.tensor.overlapping import row_product_in_pieces
from labkit.parallel.tensor.summed_gradients import with_summed_gradients


class ColumnLinear(nn.Linear):
    """x [..., in] to this rank's outputs [..., out / N]: weight [out / N, in], bias [out / N]."""

    def forward(self, input: Tensor) -> Tensor:
        with keeping(input) or nullcontext():
            return F.linear(input, self.weight, self.bias)


class RowLinear(nn.Linear):
    """This rank's inputs [..., in / N] to the sum over all ranks, [..., out]: weight [out, in / N], bias [out].

    The bias is added once, after the sum. With a sharded output the sum is reduce-scattered.
    """

    axis: Axis
    layout: Layout
    pieces: int

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(self.layout, Replicate) and self.pieces > 1 and self.axis.size > 1:
            total = row_product_in_pieces(input, self.weight, self.axis, self.pieces)
        else:
            total = leave(F.linear(input, self.weight), self.layout, self.axis)
        return add_bias(total, self.bias, -1, self.layout, self.axis)


class RowConv2d(nn.Conv2d):
    """This rank's channels [B, in / N, H, W] to the sum over all ranks; weight [out, in / N, k, k], bias [out]."""

    axis: Axis
    layout: Layout

    def forward(self, input: Tensor) -> Tensor:
        partial = self._conv_forward(input, self.weight, None)
        return add_bias(leave(partial, self.layout, self.axis), self.bias, 1, self.layout, self.axis)


def leave(partial: Tensor, layout: Layout, axis: Axis) -> Tensor:
    """Partial sums to their sum, whole or in shards."""
    return reduce_out(partial, axis) if isinstance(layout, Replicate) else scatter_out(partial, layout.dim, axis)


def add_bias(total: Tensor, bias: Tensor | None, dim: int, layout: Layout, axis: Axis) -> Tensor:
    """The sum and a bias along `dim`. On a shard of the tokens the bias has a part of its gradient only."""
    if bias is None:
        return total
    dim %= total.dim()
    if isinstance(layout, Shard):
        (used,) = with_summed_gradients(axis, bias)
        assert used is not None
        bias = used.tensor_split(axis.size)[axis.coordinate] if layout.dim % total.dim() == dim else used
    return total + bias.view(-1, *[1] * (total.dim() - 1 - dim))


class VocabularyEmbedding(nn.Embedding):
    """Token ids to vectors, of a table cut by rows: weight [V / N, d]. A token that another rank has counts as zeros.

    `num_embeddings` stays the whole vocabulary's size.
    """

    axis: Axis
    layout: Layout
    first: int

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.num_embeddings:
            raise IndexError(f"a token id is outside of 0 to {self.num_embeddings - 1}")
        if isinstance(self.layout, Shard):
            check_divides(input.shape[self.layout.dim], self.axis, "a sequence")
        count = len(self.weight)
        local = input - self.first
        foreign = (local < 0) | (local >= count)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - self.first if 0 <= padding - self.first < count else None
        if count:
            vectors = F.embedding(local.masked_fill(foreign, 0), self.weight, padding)
            vectors = vectors.masked_fill(foreign.unsqueeze(-1), 0)
        else:  # more ranks than tokens
            vectors = self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum()
        return leave(vectors, self.layout, self.axis)


class SequenceLayerNorm(nn.LayerNorm):
    """A norm on this rank's shard of the tokens, its gradients summed over the ranks."""

    axis: Axis

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = with_summed_gradients(self.axis, self.weight, self.bias)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class SequenceRMSNorm(nn.RMSNorm):
    """As `SequenceLayerNorm`, for RMSNorm."""

    axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = with_summed_gradients(self.axis, self.weight)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Change the class of a layer in place; its parameters, names and hooks stay."""
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def check_divides(length: int, axis: Axis, what: str) -> None:
    """Raise ValueError where a dim of the data can't be cut in equal shards."""
    if length % axis.size:
        more = -(-length // axis.size) * axis.size
        raise ValueError(f"{what} of {length} can't be cut in {axis.size} equal shards: pad it to {more}")
