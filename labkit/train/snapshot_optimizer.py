"""The state of any torch optimizer as placed tensors: moments are cut as their parameters are.

So a snapshot that four ranks saved, each with a quarter of the moments, is read by three, or by one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from labkit.mesh import FlatPart, Placement, placement_of
from labkit.train.snapshot_exchange import SnapshotError
from labkit.train.snapshot_reading import Snapshot

#: What an optimizer steps, by global name: a parameter, or a part of a flat tensor that holds pieces of many.
Named: TypeAlias = Mapping[str, torch.Tensor | FlatPart]


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Named, *, prefix: str = "optimizer."
) -> tuple[dict[str, tuple[torch.Tensor, Placement]], dict[str, Any]]:
    """The optimizer's state as placed tensors, named `optimizer.<key>.<parameter>`, and its settings as JSON.

    State of a parameter's own shape is placed as the parameter is; a single number (`step`) is whole; a None is left
    out. Anything else, such as the factors of Adafactor, is kept whole, and refused where the parameter is sharded.

    Args:
        named: what the optimizer steps by its global name, such as `dict(model.named_parameters())`; parameters that
            the optimizer does not have are passed over.
    """
    tensors: dict[str, tuple[torch.Tensor, Placement]] = {}
    numbers: set[str] = set()
    for name, one in named.items():
        part = _part(one)
        for key, value in optimizer.state.get(part.tensor, {}).items():
            if value is None:
                continue
            label = f"{prefix}{key}.{name}"
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers.add(key)
                value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise SnapshotError(f"state {key!r} of {name!r} is a {kind}: only tensors and numbers can be kept")
            if value.shape == part.tensor.shape:
                placement = replace(part.placement, dtype=value.dtype)
                piece = value.reshape(-1)[part.start : part.start + placement.numel].view(placement.local_shape)
                tensors[label] = piece, placement
            elif value.numel() == 1 or part.placement.is_whole:
                tensors[label] = value, Placement.of(value)
            else:
                shapes = f"{list(value.shape)}, the piece is {list(part.placement.local_shape)}"
                raise SnapshotError(f"state {key!r} of {name!r} is {shapes}: it can't be cut as the parameter is")
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group in groups:
        group.pop("param_names", None)
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "numbers": sorted(numbers)}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    named: Named,
    snapshot: Snapshot,
    settings: dict[str, Any],
    *,
    prefix: str = "optimizer.",
) -> None:
    """Put the state that `optimizer_tensors` described into `optimizer`, which may hold other pieces than were saved.

    `settings` is the second thing that it returned. Raises SnapshotError for another class or number of groups.
    """
    kind = type(optimizer).__name__
    if settings["class"] != kind or len(settings["groups"]) != len(optimizer.param_groups):
        saved = f"{settings['class']} with {len(settings['groups'])} groups of parameters"
        raise SnapshotError(f"the snapshot has {saved}, not {kind} with {len(optimizer.param_groups)}: build the same")
    for group, old in zip(optimizer.param_groups, settings["groups"], strict=True):
        for key, value in old.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    keys: dict[str, set[str]] = {}
    for label in snapshot.names:
        if label.startswith(prefix):
            key, _, name = label.removeprefix(prefix).partition(".")
            keys.setdefault(name, set()).add(key)
    # these keep even the number of steps on the GPU
    on_device = {
        id(parameter): bool(group.get("capturable") or group.get("fused"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, one in named.items():
        part = _part(one)
        if (number := id(part.tensor)) in on_device:
            for key in sorted(keys.get(name, ())):
                label, state = f"{prefix}{key}.{name}", optimizer.state[part.tensor]
                _load(state, key, label, part, snapshot, settings["numbers"], on_device[number])


def _load(
    state: dict[str, Any], key: str, label: str, part: FlatPart, snapshot: Snapshot, numbers: list[str], on_device: bool
) -> None:
    dtype, whole = snapshot.dtype(label), part.tensor.numel() == part.placement.numel
    if key in numbers or snapshot.shape(label) != part.placement.shape:
        value = snapshot.read(label)
        state[key] = value.item() if key in numbers else value.to(part.tensor.device) if on_device else value
        return
    piece = snapshot.read(label, replace(part.placement, dtype=dtype))
    if key not in state or state[key].shape != part.tensor.shape:
        state[key] = torch.zeros_like(part.tensor, dtype=dtype).detach()
    if whole:
        state[key].copy_(piece.view(part.tensor.shape))
    else:
        state[key].view(-1)[part.start : part.start + piece.numel()].copy_(piece.view(-1))


def _part(one: torch.Tensor | FlatPart) -> FlatPart:
    return one if isinstance(one, FlatPart) else FlatPart(one, 0, placement_of(one))
