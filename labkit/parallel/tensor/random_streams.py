"""Random numbers on ranks that share a network: the common ones, and each rank's own.

Ranks of one tensor-parallel group have the same state of torch's random numbers: dropout on what is replicated then
draws the same mask everywhere. Dropout on what is sharded must draw a mask of its own for every shard; it takes one
number from the common stream and mixes it with the rank's place. So all that is to be saved, restored or replayed, as
in a checkpoint or a snapshot, is torch's own state.

Source: Shoeybi and others, Megatron-LM (2019), arXiv:1909.08053, section 3, keep two states for the same purpose.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.collectives import broadcast
from labkit.collectives.calls import operation
from labkit.collectives.groups import endpoint
from labkit.mesh import Axis, as_axis
from labkit.mesh.axes import AxisLike


def share_random_state(group: AxisLike = None, *, device: torch.device | None = None) -> None:
    """Give every rank of the group the first one's random numbers. All of them call it together; control traffic."""
    axis = as_axis(group)
    end = endpoint(axis.group)
    number = torch.randint(1 << 62, (), dtype=torch.int64)
    with operation("random numbers", end, control=True):
        number = number.to(device or "cpu")
        broadcast(number, group=end.group, group_src=0)
    torch.manual_seed(int(number))


@contextmanager
def sharded_stream(axis: Axis, device: torch.device) -> Iterator[None]:
    """Inside, random numbers on `device` are this rank's own; behind it the common stream goes on."""
    number = int(torch.randint(1 << 62, ()))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(np.random.SeedSequence((number, axis.coordinate)).generate_state(1, np.uint64)[0]))
        yield


class ShardedDropout(nn.Dropout):
    """Dropout on a shard: a mask of each rank's own."""

    axis: Axis

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        with sharded_stream(self.axis, input.device):
            return super().forward(input)


class OwnNumbers:
    """A pair of hooks: forward of the module they are put on draws this rank's own numbers, in training."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._open: list[AbstractContextManager[None]] = []

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and getattr(module, "dropout", True):
            block = sharded_stream(self.axis, args[0].device)
            block.__enter__()
            self._open.append(block)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)
