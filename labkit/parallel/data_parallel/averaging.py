"""The first two steps on the path to DistributedDataParallel: averaging gradients after backward has ended.

They are right, and slow: nothing is sent while backward computes.
"""

from collections.abc import Iterable

import torch
from torch import nn

from labkit.collectives import ReduceOp, all_reduce
from labkit.collectives.groups import Group, endpoint


def average_each(parameters: Iterable[nn.Parameter], *, group: Group = None, algorithm: str = "ring") -> None:
    """One all-reduce for each gradient. Parameters whose gradient is None are skipped: the same ones on all ranks."""
    for parameter in parameters:
        if parameter.grad is not None:
            all_reduce(parameter.grad.div_(endpoint(group).size), ReduceOp.SUM, group, algorithm=algorithm)


def average_flat(parameters: Iterable[nn.Parameter], *, group: Group = None, algorithm: str = "ring") -> None:
    """One all-reduce of all gradients, copied into one flat tensor and back; they have one dtype."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(endpoint(group).size)
    all_reduce(flat, ReduceOp.SUM, group, algorithm=algorithm)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
