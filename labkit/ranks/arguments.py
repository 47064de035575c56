"""Refusing what ranks can't be started with, in one sentence each."""

import math
import numbers
import platform
from collections.abc import Sequence
from typing import Any

import torch

from labkit.collectives.network import Network
from labkit.ranks.worker import is_rank

MOST = 64


def check_arguments(world_size: Any, backend: Any, timeout: Any, network: Any, threads: Any) -> None:
    """Raise ValueError, TypeError or RuntimeError unless ranks can be started so."""
    __tracebackhide__ = True
    if is_rank():
        raise RuntimeError("Ranks: this is a rank already; start ranks from the notebook or the script, not inside one")
    if platform.system() == "Windows":
        raise RuntimeError("Ranks: Windows is not supported; run the workbook in WSL, where it is Linux")
    if not _is_whole(world_size) or not 1 <= world_size <= MOST:
        raise ValueError(f"Ranks: world_size is {world_size!r}; give a whole number of ranks from 1 to {MOST}")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"Ranks: backend is {backend!r}; give 'gloo' (CPU) or 'nccl' (a GPU for every rank)")
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        found = torch.cuda.device_count()
        raise ValueError(
            f"Ranks: backend 'nccl' needs a GPU for each of the {world_size} ranks and this machine has {found}: "
            "use backend='gloo', or fewer ranks"
        )
    check_timeout(timeout)
    if network is not None and not isinstance(network, Network):
        raise TypeError(f"Ranks: network is a {type(network).__name__}; give a labkit.collectives.Network or None")
    if not _is_whole(threads) or threads < 1:
        raise ValueError(f"Ranks: threads is {threads!r}; give the torch threads of each rank, 1 or more")


def check_timeout(timeout: Any) -> float:
    """The timeout in seconds, if it is one."""
    __tracebackhide__ = True
    is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if not is_number or not math.isfinite(timeout) or not timeout > 0:
        raise ValueError(f"Ranks: timeout is {timeout!r}; give seconds above 0")
    return float(timeout)


def check_chosen(ranks: Sequence[int], world_size: int) -> list[int]:
    """Some of the ranks, in order."""
    __tracebackhide__ = True
    chosen = sorted(set(ranks))
    if not chosen or not all(_is_whole(rank) and 0 <= rank < world_size for rank in chosen):
        given = ",".join(map(str, ranks))
        raise ValueError(f"Ranks: there is no such choice of ranks: {given!r}; there are ranks 0 to {world_size - 1}")
    return chosen


def _is_whole(number: Any) -> bool:
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)
