"""Over which ranks a model is sharded, and over which the shards are copied: inside a node and between nodes.

Source: Y. Zhao and others, PyTorch FSDP (VLDB 2023), arXiv:2304.11277, section 3.2.2: hybrid sharding. Gathers, which
are two thirds of the traffic, stay on the fast links; between nodes only shards of gradients are summed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from labkit.collectives import ReduceOp, all_reduce, broadcast
from labkit.collectives.groups import Endpoint, endpoint
from labkit.mesh import Axis, Placement, as_axis
from labkit.mesh.axes import AxisLike


@dataclass(frozen=True)
class ShardingAxes:
    """`shard` is the axis that parameters are cut along, `replicate` one along which ranks hold the same shard."""

    shard: Axis
    replicate: Axis | None = None

    @staticmethod
    def of(mesh: AxisLike) -> "ShardingAxes":
        """From a mesh of one axis, or of two: the first replicates, the second shards, as in PyTorch."""
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 2 and mesh.mesh_dim_names:
            outer, inner = mesh.mesh_dim_names
            return ShardingAxes(as_axis(mesh[inner]), as_axis(mesh[outer]))
        if isinstance(mesh, DeviceMesh) and mesh.ndim > 2:
            raise ValueError(
                f"fully_shard: the mesh has {mesh.ndim} axes; give one, or two of which the first replicates"
            )
        return ShardingAxes(as_axis(mesh))

    @property
    def end(self) -> Endpoint:
        """The group that shards."""
        return endpoint(self.shard.group)

    @property
    def size(self) -> int:
        """All ranks together: by so many a gradient is divided."""
        return self.shard.size * (self.replicate.size if self.replicate else 1)

    def placement(self, whole: Placement, start: int, stop: int) -> Placement:
        """Of elements `start` to `stop` of a flattened parameter."""
        piece = whole.sharded_flat(start, stop, self.shard)
        return piece.replicated(self.replicate) if self.replicate else piece

    def spread(self, tensor: torch.Tensor) -> None:
        """Set a tensor to the very first rank's."""
        for axis in (self.shard, self.replicate):
            if axis is not None and axis.size > 1:
                broadcast(tensor, group=axis.group, group_src=0)

    def sum_between(self, shard: torch.Tensor) -> None:
        """Sum a shard of gradients over the ranks that hold the same one."""
        if self.replicate is not None and self.replicate.size > 1:
            all_reduce(shard, ReduceOp.SUM, self.replicate.group)

    def reduce_over_all(self, tensor: torch.Tensor, op: Any) -> None:
        """Reduce a small tensor over all ranks."""
        for axis in (self.shard, self.replicate):
            if axis is not None and axis.size > 1:
                all_reduce(tensor, op, axis.group)
