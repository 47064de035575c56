"""`init_device_mesh`: the ranks arranged in axes, on PyTorch's DeviceMesh."""

import math

import torch.distributed as dist
from torch.distributed import device_mesh as torchs
from torch.distributed.device_mesh import DeviceMesh

from labkit.collectives.groups import resolve

AXES = ("dp", "pp", "tp")


def init_device_mesh(device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """Arrange all ranks in a mesh, the last axis running fastest, and make a group for every line along an axis.

    Every rank calls it, with the same arguments. labkit's techniques look for the axes "dp" (data parallel),
    "pp" (pipeline stages) and "tp" (tensor parallel), in this order; other names are allowed. Records count what
    travels along an axis under its name; where one axis spans all ranks its group is the world's, and is called so.

    Args:
        device_type: "cpu" or "cuda".
        mesh_shape: ranks along each axis; their product is the world size.
        mesh_dim_names: the name of each axis, each once.

    Raises ValueError in one sentence where they don't fit.
    """
    world_size = dist.get_world_size(resolve(None))
    shape, names = tuple(mesh_shape), tuple(mesh_dim_names)
    if len(shape) != len(names) or len(set(names)) != len(names) or not shape:
        raise ValueError(f"init_device_mesh: shape {shape} with the names {names}; give every axis one name of its own")
    if any(not isinstance(size, int) or size < 1 for size in shape):
        raise ValueError(f"init_device_mesh: shape is {shape}; give whole numbers of ranks, 1 or more")
    if math.prod(shape) != world_size:
        told = " x ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))
        raise ValueError(f"init_device_mesh: {told} makes {math.prod(shape)} ranks, but there are {world_size}")
    return torchs.init_device_mesh(device_type, shape, mesh_dim_names=names)
