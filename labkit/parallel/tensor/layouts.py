"""Layouts: how an activation lies on the ranks of the axis. PyTorch's `Replicate()` and `Shard(dim)` are taken too."""

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Replicate:
    """Every rank has the whole tensor."""


@dataclass(frozen=True)
class Shard:
    """Every rank has a part of dim `dim`; as torch.tensor_split, the longer parts first."""

    dim: int


Layout: TypeAlias = Replicate | Shard


def as_layout(given: Any, default: Layout, what: str) -> Layout:
    """The layout that `given` names, `default` for None; `what` it is for, in words for an error."""
    if given is None:
        return default
    if isinstance(given, tuple) and len(given) == 1:  # as PyTorch's plans may write it
        given = given[0]
    name = type(given).__name__
    if name == "Replicate":
        return Replicate()
    if name == "Shard" and isinstance(getattr(given, "dim", None), int):
        return Shard(given.dim)
    raise ValueError(f"{what} is {given!r}; give Replicate() or Shard(dim)")
