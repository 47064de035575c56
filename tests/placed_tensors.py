"""Tensors for snapshots to keep, and what a folder of snapshots holds."""

from pathlib import Path

import torch

from labkit.mesh import Placement


def whole(value: torch.Tensor) -> tuple[torch.Tensor, Placement]:
    return value, Placement.of(value)


def weights(step: int) -> dict[str, tuple[torch.Tensor, Placement]]:
    return {"w": whole(torch.full((50, 20), float(step))), "b": whole(torch.arange(step + 1.0))}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")
