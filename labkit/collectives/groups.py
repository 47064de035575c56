"""Groups of ranks, as torch.distributed knows them. None means the world."""

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
    if group is dist.group.WORLD:
        return "world"
    description: str = group.group_desc
    if description and description != "undefined":
        return description.removeprefix("mesh_")
    return "ranks " + ",".join(map(str, dist.get_process_group_ranks(group)))


def global_rank(group: dist.ProcessGroup, rank: int | None, rank_in_group: int | None, what: str) -> int:
    """The global rank meant by `rank` (global) or `rank_in_group`: exactly one is given, as in torch.distributed."""
    if (rank is None) == (rank_in_group is None):
        raise ValueError(f"give either {what} (a global rank) or group_{what} (its place in the group)")
    members = dist.get_process_group_ranks(group)
    if rank_in_group is not None:
        if not 0 <= rank_in_group < len(members):
            raise ValueError(f"group_{what} is {rank_in_group}; the group has ranks 0 to {len(members) - 1}")
        return members[rank_in_group]
    assert rank is not None
    if rank not in members:
        raise ValueError(f"{what} is rank {rank}, which is not in this group; it has the ranks {members}")
    return rank
