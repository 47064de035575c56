"""A parameter that several stages share, such as an embedding that is the head too: each rank that needs it has a copy.

The copies start equal, and after each step their gradients are summed by one all-reduce, so that they stay equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import Parameter

from labkit.collectives import all_reduce, broadcast
from labkit.mesh import Axis, Placement, place

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Tie:
    """Parameters that the same ranks hold copies of."""

    axis: Axis
    parameters: tuple[Parameter, ...]


def place_and_tie(parameters: Iterable[Parameter], tied: Mapping[Parameter, Sequence[int]], axis: Axis) -> list[Tie]:
    """Attach a Placement to each of this rank's parameters, and group the tied ones by who holds them. All ranks of the
    pipeline call it together; the first holder's values are taken by the others.

    `tied` gives the stages that hold a parameter, in the same order on all ranks; stage s is on rank s modulo their
    number.
    """
    mine = set(parameters)
    if axis.size > 1:
        for parameter in mine - set(tied):
            place(parameter, Placement.of(parameter).staged(axis))
    found: dict[tuple[int, ...], list[Parameter]] = {}
    for parameter, stages in tied.items():
        if parameter in mine:
            found.setdefault(tuple(sorted({axis.ranks[stage % axis.size] for stage in stages})), []).append(parameter)
    ties = []
    for holders, shared in sorted(found.items()):
        if len(holders) == 1:  # stages of one rank
            for parameter in shared:
                place(parameter, Placement.of(parameter).staged(axis) if axis.size > 1 else Placement.of(parameter))
            continue
        line = axis if holders == axis.ranks else _line(holders)
        for parameter in shared:
            place(parameter, Placement.of(parameter).tied(line))
            broadcast(parameter.detach(), group=line.group, group_src=0)
        ties.append(Tie(line, tuple(shared)))
    return ties


def sum_gradients(tie: Tie) -> None:
    """One all-reduce for all gradients of one dtype. A copy that has none counts as zeros."""
    trained = [parameter for parameter in tie.parameters if parameter.requires_grad]
    for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
        some = [parameter for parameter in trained if parameter.dtype == dtype]
        for parameter in some:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in some if parameter.grad is not None]
        if len(grads) == 1:
            all_reduce(grads[0], group=tie.axis.group)
            continue
        flat = torch.cat([grad.flatten() for grad in grads])
        all_reduce(flat, group=tie.axis.group)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def _line(holders: tuple[int, ...]) -> Axis:
    group = _groups.get(holders)
    if group is None or group not in dist.distributed_c10d._world.pg_map:
        # only those who hold it need to know of the group
        made = dist.new_group(list(holders), use_local_synchronization=True, group_desc="tied")
        assert isinstance(made, dist.ProcessGroup)
        group = _groups[holders] = made
    return Axis("tied", holders, holders.index(dist.get_rank()), group)
