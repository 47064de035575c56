"""Process groups for tests that run on ranks."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist


def new_group(ranks: Iterable[int], name: str | None = None) -> Any:
    """torch.distributed.new_group; ranks outside of it get torch's marker, which is no group."""
    return dist.new_group(list(ranks), group_desc=name)
