"""`all_to_all_single`: every rank has a part for every other."""

from collections.abc import Sequence

import torch

from labkit.collectives.agreement import COLLECTIVE_TAG, collective
from labkit.collectives.background import perform
from labkit.collectives.flattening import size_of
from labkit.collectives.groups import Group, endpoint
from labkit.collectives.messages import Work
from labkit.collectives.pairing import start_together


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send part r of `input` to the group's rank r, and fill part r of `output` with what rank r sends here.

    Both are cut along dim 0, in equal parts or as the split sizes say. A rank sends all but its own part. `input`
    keeps its values. In round s each rank sends to the rank s places on, so that no rank is sent to by two at once.
    """
    end = endpoint(group)
    outgoing = _cut("input", input, input_split_sizes, end.size)
    incoming = _cut("output", output, output_split_sizes, end.size)
    if input.dtype != output.dtype:
        raise ValueError(f"all_to_all_single: input is {input.dtype} and output {output.dtype}; make them equal")
    if input.shape[1:] != output.shape[1:]:
        raise ValueError(
            f"all_to_all_single: input has rows of shape {list(input.shape[1:])} and output of "
            f"{list(output.shape[1:])}; they may differ in dim 0 only"
        )

    def run() -> None:
        # the numbers of rows may differ: what is agreed on is one row
        row = input.detach().new_empty(0, *input.shape[1:])
        with collective(end, "all_to_all_single", row, bytes=size_of(input)):
            incoming[end.place].copy_(outgoing[end.place])
            for distance in range(1, end.size):
                to, source = (end.place + distance) % end.size, (end.place - distance) % end.size
                # sizes differ from rank to rank: a header says what comes
                (receiving,), (sending,) = start_together(
                    end, [(incoming[source], source)], [(outgoing[to].contiguous(), to)], COLLECTIVE_TAG, headed=True
                )
                receiving.wait()
                sending.wait()

    return perform(run, end, async_op=async_op)


def _cut(name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, size: int) -> list[torch.Tensor]:
    if tensor.dim() == 0:
        raise ValueError(f"all_to_all_single: {name} has no dim to cut; give it at least one")
    rows = tensor.shape[0]
    if sizes is None:
        if rows % size:
            raise ValueError(
                f"all_to_all_single: {name} has {rows} rows, which {size} ranks don't divide; give split sizes"
            )
        sizes = [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows:
        raise ValueError(
            f"all_to_all_single: {name} has {rows} rows and split sizes {list(sizes)}; give {size} sizes that add up"
        )
    return list(tensor.detach().split(list(sizes)))
