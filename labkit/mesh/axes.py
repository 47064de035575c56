"""`Axis`: a line of ranks along which a model is split or copied, as one of these ranks sees it."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from labkit.collectives.groups import name_of, resolve


@dataclass(frozen=True)
class Axis:
    """A named line of global ranks, and this rank's place in it. Plain data: it may be compared, and sent elsewhere.

    Args:
        name: what records and pictures call it, such as "tp".
        ranks: the global ranks in order.
        coordinate: this rank's place, 0 to len(ranks) - 1.
        group: the process group to communicate over; None where the axis is only reasoned about. It does not travel
            to other processes.
    """

    name: str
    ranks: tuple[int, ...]
    coordinate: int
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks) or not self.ranks:
            raise ValueError(f"Axis {self.name!r}: ranks are {self.ranks}; give one or more, each once")
        if not 0 <= self.coordinate < len(self.ranks):
            raise ValueError(f"Axis {self.name!r}: coordinate is {self.coordinate}; its ranks are {self.ranks}")

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Axis":
        return self  # a process group has no copy

    def __reduce__(self) -> tuple[type["Axis"], tuple[Any, ...]]:
        return Axis, (self.name, self.ranks, self.coordinate)


#: What names an axis: an Axis, a one-dimensional DeviceMesh such as `mesh["tp"]`, a process group, None for the world.
AxisLike: TypeAlias = Axis | DeviceMesh | dist.ProcessGroup | None


def as_axis(like: AxisLike) -> Axis:
    """The axis that `like` names, on this rank."""
    if isinstance(like, Axis):
        return like
    name = None
    if isinstance(like, DeviceMesh):
        names = like.mesh_dim_names or ("?",) * like.ndim
        if like.ndim != 1:
            raise ValueError(f"this mesh has the axes {', '.join(names)}: say which one, as in mesh[{names[0]!r}]")
        name, like = names[0], like.get_group()
    group = resolve(like)
    ranks = dist.get_process_group_ranks(group)
    return Axis(name or name_of(group), tuple(ranks), ranks.index(dist.get_rank()), group)
