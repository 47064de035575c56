"""`reduce_scatter_tensor` and `all_gather_into_tensor`: the two halves of the ring, each a collective of its own."""

from typing import Any

import torch
from torch.distributed import ReduceOp

from labkit.collectives.agreement import collective
from labkit.collectives.background import perform
from labkit.collectives.flattening import flat_view, size_of
from labkit.collectives.groups import Group, endpoint
from labkit.collectives.messages import Work
from labkit.collectives.reductions import check_op, divide, name_of_op
from labkit.collectives.ring import ring_all_gather, ring_reduce_scatter, ring_reduce_scatter_in_place


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce `input` over the group and keep this rank's part of the result in `output`.

    `input` holds N parts of `output`'s size, concatenated or stacked, part r for the group's rank r; it keeps its
    values. Where `output` is this rank's own part of it no further memory is needed, and the other parts are left with
    partial sums. A rank sends N - 1 parts: K (N - 1) / N elements of K. The sum of part r runs in the order of ranks
    r + 1, ..., r.
    """
    end = endpoint(group)
    _check_sizes("reduce_scatter_tensor", "input", input, "output", output, end.size)
    check_op(op, input)

    def run() -> None:
        with collective(end, "reduce_scatter_tensor", input, name_of_op(op), bytes=size_of(input)):
            parts = input.detach().contiguous().reshape(-1).split(max(1, output.numel()))
            with flat_view(output) as flat:
                if end.size == 1:
                    flat.copy_(parts[0])
                    divide(flat, op, 1)
                elif flat.numel() and flat.data_ptr() == parts[end.place].data_ptr():
                    ring_reduce_scatter_in_place(parts, op, end)
                else:
                    ring_reduce_scatter(flat, _whole(parts, flat, end.size), op, end)

    return perform(run, end, async_op=async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Gather the `input_tensor` of every rank into `output_tensor`, that of the group's rank r as part r.

    `output_tensor` has N times the size, concatenated or stacked. A rank sends N - 1 parts: K (N - 1) / N elements of
    K. `input_tensor` may be this rank's part of `output_tensor`.
    """
    end = endpoint(group)
    _check_sizes("all_gather_into_tensor", "output", output_tensor, "input", input_tensor, end.size)

    def run() -> None:
        with collective(end, "all_gather_into_tensor", input_tensor, bytes=size_of(output_tensor)):
            with flat_view(output_tensor) as flat:
                mine = input_tensor.detach().reshape(-1)
                parts = _whole(flat.split(max(1, input_tensor.numel())), mine, end.size)
                if parts[end.place].data_ptr() != mine.data_ptr():
                    parts[end.place].copy_(mine)
                if end.size > 1:
                    ring_all_gather(parts, end)

    return perform(run, end, async_op=async_op)


def _whole(parts: Any, like: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The parts; N empty ones where there is nothing to split."""
    return list(parts) if like.numel() else [like] * size


def _check_sizes(
    call: str, large_name: str, large: torch.Tensor, small_name: str, small: torch.Tensor, size: int
) -> None:
    if large.numel() != size * small.numel():
        raise ValueError(
            f"{call}: the {large_name} has {large.numel()} elements and the {small_name} {small.numel()}; "
            f"over {size} ranks the {large_name} needs {size} times as many"
        )
    if large.dtype != small.dtype:
        raise ValueError(
            f"{call}: the {large_name} is {large.dtype} and the {small_name} {small.dtype}; make them equal"
        )
