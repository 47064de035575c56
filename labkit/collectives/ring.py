"""The ring: every rank sends to the next and receives from the one before, so that all links work at once.

Source: P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009),
section 3: reduce-scatter, then all-gather; 2 (N - 1) chunks a rank, 2 K (N - 1) / N elements where N divides K.
"""

from collections.abc import Sequence
from typing import Any

import torch

from labkit.collectives.circulation import Step, circulate, pieces, swap
from labkit.collectives.groups import Endpoint
from labkit.collectives.reductions import combination, divide


def chunks(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`count` views of a flat tensor whose lengths differ by at most one, the longer ones first."""
    return list(torch.tensor_split(flat, count))


def ring_all_reduce(flat: torch.Tensor, op: Any, end: Endpoint) -> None:
    """All-reduce a flat contiguous tensor in place. Rank c finishes chunk c, which all others copy: the sum runs in
    the order of ranks c + 1, c + 2, ..., c.

    Two ranks are each other's neighbours on both sides, so that both phases can fold into one: each sends all it has,
    which is 2 K (N - 1) / N as ever, and both add all. While a chunk is one piece that saves a wait for the other; of
    more pieces, which overlap, it would only add twice.
    """
    parts = [pieces(chunk) for chunk in chunks(flat, end.size)]
    if end.size == 2 and len(parts[0]) == 1:
        combine = combination(op)

        def finish(own: torch.Tensor, arrived: torch.Tensor) -> None:
            combine(own, arrived)
            divide(own, op, 2)

        swap(end, flat, finish)
        return
    circulate(end, _reduce_scatter_steps(parts, op, end) + _all_gather_steps(parts, end))


def ring_reduce_scatter(output: torch.Tensor, parts: Sequence[torch.Tensor], op: Any, end: Endpoint) -> None:
    """Reduce chunk c of all ranks into rank c's flat `output`. `parts` are this rank's N flat chunks, and keep their
    values: the partial sums travel in buffers of their own."""
    own = [pieces(part) for part in parts]
    # the last sum is the output; the others take turns in two buffers
    spare = [torch.empty_like(output) for _ in range(min(2, end.size - 2))]
    cut = [pieces(output if step == end.size - 2 else spare[step % 2]) for step in range(end.size - 1)]
    combine, steps = combination(op), []
    for step in range(end.size - 1):
        outgoing = own[(end.place - 1) % end.size] if step == 0 else cut[step - 1]
        mine, last = own[(end.place - 2 - step) % end.size], step == end.size - 2

        def finish(piece: int, arrived: torch.Tensor, mine: list[torch.Tensor] = mine, last: bool = last) -> None:
            combine(arrived, mine[piece])
            if last:
                divide(arrived, op, end.size)

        steps.append(Step(outgoing, cut[step], cut[step], finish, reuses=step >= 2))
    circulate(end, steps)


def ring_reduce_scatter_in_place(parts: Sequence[torch.Tensor], op: Any, end: Endpoint) -> None:
    """As `ring_reduce_scatter`, into this rank's own part; the others are left with partial sums."""
    circulate(end, _reduce_scatter_steps([pieces(part) for part in parts], op, end))


def ring_all_gather(parts: Sequence[torch.Tensor], end: Endpoint) -> None:
    """Fill the N flat chunks in place: chunk c comes from rank c."""
    circulate(end, _all_gather_steps([pieces(part) for part in parts], end))


def _reduce_scatter_steps(parts: list[list[torch.Tensor]], op: Any, end: Endpoint) -> list[Step]:
    combine, steps = combination(op), []
    for step in range(end.size - 1):
        outgoing, mine = parts[(end.place - 1 - step) % end.size], parts[(end.place - 2 - step) % end.size]
        last = step == end.size - 2

        def finish(piece: int, arrived: torch.Tensor, mine: list[torch.Tensor] = mine, last: bool = last) -> None:
            combine(mine[piece], arrived)
            if last:
                divide(mine[piece], op, end.size)

        steps.append(Step(outgoing, [None] * len(mine), mine, finish))
    return steps


def _all_gather_steps(parts: list[list[torch.Tensor]], end: Endpoint) -> list[Step]:
    steps = []
    for step in range(end.size - 1):
        outgoing, incoming = parts[(end.place - step) % end.size], parts[(end.place - 1 - step) % end.size]
        steps.append(Step(outgoing, list(incoming), incoming))
    return steps
