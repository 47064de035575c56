"""Gather, scatter and reduce-scatter along one dim of a tensor, for parts that may differ by one in length.

Collectives move parts of equal size: where the dim is no multiple of the number of ranks, every part is padded to the
longest, and the padding counts as bytes sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from labkit.collectives.formulas import chunk_lengths
from labkit.mesh import Axis


def all_reduced(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, a new tensor."""
    result = x.detach().clone(memory_format=torch.contiguous_format)
    all_reduce(result, group=axis.group)
    return result


def part_of(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's part of dim `dim`, a contiguous copy, since a view would keep the whole alive."""
    return x.detach().tensor_split(axis.size, dim)[axis.coordinate].clone(memory_format=torch.contiguous_format)


def gathered_along(x: Tensor, dim: int, axis: Axis, total: int | None = None) -> Tensor:
    """The parts of all ranks side by side along `dim`; `total` is its whole length, N times this part's if None."""
    dim = dim % x.dim()
    lengths = _lengths(x.shape[dim], axis, total)
    own = _padded(x.detach(), dim, lengths[0])
    parts = torch.empty(axis.size, *own.shape, dtype=x.dtype, device=x.device)
    all_gather_into_tensor(parts, own, axis.group)
    if lengths[0] == lengths[-1]:
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)


def reduced_part(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's part along `dim` of the sum over the axis, a new tensor."""
    dim = dim % x.dim()
    lengths = chunk_lengths(x.shape[dim], axis.size)
    if lengths[0] == lengths[-1]:
        parts = x.detach().unflatten(dim, (axis.size, lengths[0])).movedim(dim, 0).contiguous()
    else:
        parts = torch.stack([_padded(part, dim, lengths[0]) for part in x.detach().tensor_split(axis.size, dim)])
    result = torch.empty(parts.shape[1:], dtype=x.dtype, device=x.device)
    reduce_scatter_tensor(result, parts, group=axis.group)
    return result.narrow(dim, 0, lengths[axis.coordinate])


def _lengths(own: int, axis: Axis, total: int | None) -> Sequence[int]:
    lengths = chunk_lengths(own * axis.size if total is None else total, axis.size)
    if lengths[axis.coordinate] != own:
        raise ValueError(
            f"this rank has {own} of {total} along the dim to gather, but its part of {axis.size} is "
            f"{lengths[axis.coordinate]}"
        )
    return lengths


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x.contiguous()
    padding = [*x.shape[:dim], length - x.shape[dim], *x.shape[dim + 1 :]]
    return torch.cat([x, x.new_zeros(padding)], dim)
