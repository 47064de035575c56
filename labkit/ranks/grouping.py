"""The process group of a rank: joined at the start, left and built anew after a failure."""

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d

from labkit.collectives.background import forget_threads
from labkit.collectives.calls import forget_unfinished
from labkit.collectives.groups import forget_endpoints
from labkit.collectives.spare_memory import forget_spare
from labkit.ranks import stores
from labkit.ranks.jobs import Job
from labkit.ranks.sockets import shut_connections

_GENERATION = 1 << 20  # groups that one generation may have


def join(job: Job, number: int) -> None:
    """Build the world group of the `number`th generation, together with the other ranks."""
    if job.backend == "nccl":
        torch.cuda.set_device(job.rank)
    # of a single message: it can't be changed later, so it is only the last resort
    longest = timedelta(seconds=max(job.start_limit, 10 * job.timeout))
    store = FileStore(stores.path(job.stores, number), job.world_size)
    # a mesh finds its groups by name: an old one must find none, rather than another
    distributed_c10d._world.group_count = (number - 1) * _GENERATION
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=longest)
    limit_waits(job.timeout)


def leave() -> None:
    """Leave the group. Its connections are shut, since a wrapper or a mesh may keep it alive."""
    shut_connections()
    with contextlib.suppress(Exception):  # its connections are gone
        dist.destroy_process_group()
    forget_unfinished()
    forget_endpoints()
    forget_spare()
    forget_threads()


def limit_waits(seconds: float) -> None:
    """Let every collective in every group, those built later included, wait `seconds` at most. Who waits longer for
    a single message is freed by the process that started the ranks."""
    limit = timedelta(seconds=seconds)
    # what new_group takes where it is given none: else half an hour
    defaults: Any = distributed_c10d
    defaults.default_pg_timeout = defaults.default_pg_nccl_timeout = limit
    for group, (_, store) in list(distributed_c10d._world.pg_map.items()):
        dist.set_timeout(limit, group)
        store.set_timeout(limit)
