"""The normalisations that a network can be built with, by name. Others may add their own."""

from collections.abc import Callable

from torch import nn

Norm = Callable[[int], nn.Module]


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(min(32, channels // 4), channels)


_norms: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": _group_norm}
_elsewhere = {"sync": "labkit.parallel"}


def register_norm(name: str, norm: Norm) -> None:
    """Make `norm(channels)`, which returns a module, known as `name`."""
    _norms[name] = norm


def find_norm(name: str) -> Norm:
    """The norm of that name; ValueError in one sentence where there is none, or none yet."""
    if name in _norms:
        return _norms[name]
    if name in _elsewhere:
        home = _elsewhere[name]
        raise ValueError(f"norm={name!r} spans the ranks and lives in {home}: write `import {home}` first.")
    known = ", ".join(map(repr, sorted({*_norms, *_elsewhere})))
    raise ValueError(f"norm must be one of {known}, not {name!r}.")
