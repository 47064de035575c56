"""The ring: every rank sends to the next and receives from the one before, so that all links work at once.

Source: P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009):
reduce-scatter, then all-gather; 2 (N - 1) messages a rank, and 2 K (N - 1) / N elements where N divides K.
"""

from typing import Any

import torch
import torch.distributed as dist

from labkit.collectives.point_to_point import irecv, isend
from labkit.collectives.reductions import combine, divide


def chunks(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`count` views of a flat tensor whose lengths differ by at most one, the longer ones first."""
    return list(torch.tensor_split(flat, count))


def ring_all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """All-reduce in place by the ring. Chunk c is summed in the order of ranks c, c + 1, ... for every rank."""
    members = dist.get_process_group_ranks(group)
    size, place = len(members), members.index(dist.get_rank())
    if size == 1:
        return
    after, before = members[(place + 1) % size], members[(place - 1) % size]
    flat = tensor.detach().contiguous().view(-1)
    mine = chunks(flat, size)
    part = torch.empty_like(mine[0])
    for step in range(size - 1):
        outgoing, incoming = mine[(place - step) % size], mine[(place - step - 1) % size]
        _pass_on(outgoing, after, part[: incoming.numel()], before, group)
        combine(incoming, part[: incoming.numel()], op)
    divide(mine[(place + 1) % size], op, size)
    for step in range(size - 1):
        outgoing, incoming = mine[(place + 1 - step) % size], mine[(place - step) % size]
        _pass_on(outgoing, after, incoming, before, group)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _pass_on(outgoing: torch.Tensor, after: int, incoming: torch.Tensor, before: int, group: dist.ProcessGroup) -> None:
    receiving = irecv(incoming, before, group)
    sending = isend(outgoing, after, group)
    receiving.wait()
    sending.wait()
