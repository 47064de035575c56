"""Groups of ranks, as torch.distributed knows them. None means the world."""

from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist

Group: TypeAlias = dist.ProcessGroup | None


def resolve(group: Group) -> dist.ProcessGroup:
    """The group itself, the world for None. A group of ranks that have been restarted since is refused."""
    if not dist.is_initialized():
        raise RuntimeError(
            "there are no ranks here: run this with labkit.ranks.launch, in a %%ranks cell, or under torchrun"
        )
    chosen = dist.group.WORLD if group is None else group
    # new_group hands non-members this marker instead of a group
    if not isinstance(chosen, dist.ProcessGroup):
        raise RuntimeError("this rank is not a member of the group: call the collective on the group's ranks only")
    if chosen not in dist.distributed_c10d._world.pg_map:
        raise RuntimeError("this group was built before the ranks were restarted: build it, and what uses it, again")
    return chosen


def name_of(group: dist.ProcessGroup) -> str:
    """What a record calls the group: "world", the mesh axis it was made for, or the ranks it holds."""
    return endpoint(group).name


@dataclass(frozen=True)
class Endpoint:
    """A group as this rank sees it; looked up once, since every message needs it."""

    group: dist.ProcessGroup
    members: tuple[int, ...]  # global ranks in group order
    place: int  # this rank's position among them
    name: str
    nccl: bool  # matches messages by order alone and takes GPU tensors only

    @property
    def size(self) -> int:
        return len(self.members)


_endpoints: dict[dist.ProcessGroup, Endpoint] = {}


def endpoint(group: Group) -> Endpoint:
    """The endpoint of a group, None for the world; refused as by `resolve`."""
    chosen = resolve(group)
    found = _endpoints.get(chosen)
    if found is None:
        members = tuple(dist.get_process_group_ranks(chosen))
        found = Endpoint(
            chosen, members, members.index(dist.get_rank()), _name(chosen, members), dist.get_backend(chosen) == "nccl"
        )
        _endpoints[chosen] = found
    return found


def forget_endpoints() -> None:
    """Called when the groups are built anew."""
    _endpoints.clear()


def _name(group: dist.ProcessGroup, members: tuple[int, ...]) -> str:
    if group is dist.group.WORLD:
        return "world"
    description: str = group.group_desc
    if description and description != "undefined":
        return description.removeprefix("mesh_")
    return "ranks " + ",".join(map(str, members))


def place_of(end: Endpoint, rank: int | None, rank_in_group: int | None, what: str) -> int:
    """The place in the group that is meant by `rank` (global) or `rank_in_group`: exactly one is given."""
    if (rank is None) == (rank_in_group is None):
        raise ValueError(f"give either {what} (a global rank) or group_{what} (its place in the group)")
    if rank_in_group is not None:
        if not 0 <= rank_in_group < end.size:
            raise ValueError(f"group_{what} is {rank_in_group}; the group has ranks 0 to {end.size - 1}")
        return rank_in_group
    if rank not in end.members:
        raise ValueError(f"{what} is rank {rank}, which is not in this group; it has the ranks {list(end.members)}")
    return end.members.index(rank)
