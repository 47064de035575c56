"""Agreement between the ranks that save or open a snapshot together: small texts that every rank tells all others.

One rank's error is raised on all, so that nobody waits for a rank that has given up. Control traffic: recorded, but
counted apart and never delayed by an emulated network.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labkit.collectives import recv, send
from labkit.collectives.calls import operation
from labkit.collectives.groups import Group, endpoint, resolve


class SnapshotError(RuntimeError):
    """A snapshot could not be written, or is not whole; in one sentence."""


class Exchange:
    """What each rank of `group` says, told to all of them. Without torch.distributed there is one rank.

    They wait for one another as long as the group's timeout allows: raise it where a disk is slower.
    """

    def __init__(self, group: Group = None) -> None:
        self.alone = group is None and not dist.is_initialized()
        self.group = None if self.alone else resolve(group)
        self.ranks = [0] if self.group is None else dist.get_process_group_ranks(self.group)
        self.place = 0 if self.alone else self.ranks.index(dist.get_rank())

    @property
    def is_first(self) -> bool:
        """Whether this is the group's first rank, which does what is done once."""
        return self.place == 0

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks in the group's order."""
        text = json.dumps(value)
        if len(self.ranks) == 1:
            return [json.loads(text)]
        first, *others = self.ranks
        with operation("snapshot", endpoint(self.group), control=True):
            if self.is_first:
                texts = [text, *[self._receive(rank) for rank in others]]
                whole = "[" + ",".join(texts) + "]"
                for rank in others:
                    self._send(whole, rank)
            else:
                self._send(text, first)
                whole = self._receive(first)
        values: list[Any] = json.loads(whole)
        return values

    def together(self, action: Callable[[], Any], what: str) -> list[Any]:
        """What `action` returns on each rank, in order. Where it fails on any, SnapshotError is raised on all."""
        error: Exception | None = None
        try:
            told: dict[str, Any] = {"value": action()}
        except Exception as raised:
            error, told = raised, {"error": " ".join(str(raised).split()) or type(raised).__name__}
        results = self.gather(told)
        for rank, one in zip(self.ranks, results, strict=True):
            if "error" in one:
                who = "" if len(self.ranks) == 1 else f" on rank {rank}"
                raise SnapshotError(f"{what} failed{who}: {one['error']}") from error
        return [one["value"] for one in results]

    def _device(self) -> torch.device:
        on_gpu = self.group is not None and dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def _send(self, text: str, rank: int) -> None:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self._device())
        length = torch.tensor([data.numel()], device=self._device())
        send(length, rank, self.group)
        send(data, rank, self.group)

    def _receive(self, rank: int) -> str:
        length = torch.zeros(1, dtype=torch.int64, device=self._device())
        recv(length, rank, self.group)
        data = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device())
        recv(data, rank, self.group)
        return data.cpu().numpy().tobytes().decode()
