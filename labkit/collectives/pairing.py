"""Starting sends and receives together, so that two ranks which both send and both receive can't wait for each other.

gloo takes receives and sends in any order. NCCL carries out what is between two ranks in the order of the calls: both
receiving first is a deadlock, unless the calls are one group (NCCL user guide, "Point-to-point communication").
"""

from collections.abc import Iterable

import torch

from labkit.collectives.groups import Endpoint
from labkit.collectives.messages import Receiving, Sending

Parts = Iterable[tuple[torch.Tensor, int]]


def start_together(
    end: Endpoint, receives: Parts, sends: Parts, tag: int, *, headed: bool = False
) -> tuple[list[Receiving], list[Sending]]:
    """Post receives into tensors and sends of tensors, each with the place of its peer; returns both under way.

    On NCCL every peer must start what matches in one call too.
    """
    if not end.nccl:
        # receives first: a message that is expected is sent at once, else the backend asks first
        arriving = [Receiving(end, tensor, place, tag, headed=headed) for tensor, place in receives]
        return arriving, [Sending(end, tensor, place, tag, headed=headed) for tensor, place in sends]
    receives, sends = list(receives), list(sends)
    if not receives and not sends:
        return [], []
    device = (receives or sends)[0][0].device
    end.group._start_coalescing(device)
    arriving = [Receiving(end, tensor, place, tag, headed=False) for tensor, place in receives]
    leaving = [Sending(end, tensor, place, tag, headed=False) for tensor, place in sends]
    work = end.group._end_coalescing(device)  # of all of them
    for receiving in arriving:
        receiving.work = work
    for sending in leaving:
        sending.works = [work]
    return arriving, leaving
