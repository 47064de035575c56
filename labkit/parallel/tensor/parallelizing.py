"""`parallelize_module`: a model that knows nothing of it is shared out among ranks, by a plan, in place."""

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import Tensor, nn

from labkit.collectives.groups import endpoint
from labkit.mesh import Axis, as_axis, place, placement_of
from labkit.mesh.axes import AxisLike
from labkit.parallel.data_parallel.marking import is_wrapped
from labkit.parallel.data_parallel.replicas import broadcast_tensors, check_same_model
from labkit.parallel.tensor.attention_style import check_heads
from labkit.parallel.tensor.random_streams import share_random_state
from labkit.parallel.tensor.styles import Cut, ParallelStyle

_Model = TypeVar("_Model", bound=nn.Module)
Plan = Mapping[str, ParallelStyle]


def parallelize_module(
    module: _Model,
    device_mesh: AxisLike = None,
    parallelize_plan: ParallelStyle | Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> _Model:
    """Share `module` out among the ranks of an axis, in place, and return it; all of them call it together.

    Each rank keeps its slices of one full initialisation, that of the rank `src_data_rank` of the axis, so that every
    number of ranks starts from the same network. Names of parameters don't change, and tied ones stay tied. Every
    parameter gets its Placement: sharded over the axis, or replicated. The ranks get the same random numbers, which is
    what dropout on replicated tensors needs. Build the optimizer afterwards.

    Args:
        module: on every rank of the same shape.
        device_mesh: one axis of a mesh, such as `mesh["tp"]`, or a process group; None means the world.
        parallelize_plan: a style, for the module itself, or styles by the names of submodules; `*` stands for any name
            between two dots, as in "blocks.*.attention".
        src_data_rank: whose values the others are given; None: nothing is sent, each keeps its own, and its own random
            numbers.

    Raises ValueError, in one sentence and before anything is changed, for a plan that does not fit.
    """
    axis = as_axis(device_mesh)
    found = styles_by_name(module, parallelize_plan)
    cuts = [cut for name, (style, one) in found.items() for cut in style.cuts(one, name, axis)]
    _refuse(module, cuts, axis)
    if src_data_rank is not None and axis.size > 1:
        _same_start(module, axis, src_data_rank)
    distinct = {id(cut.tensor): cut for cut in cuts}
    if axis.size > 1:
        for cut in distinct.values():
            cut.perform(axis)
        for style, one in found.values():
            style.install(one, axis)
    for parameter in module.parameters():
        placement = placement_of(parameter)
        if id(parameter) not in distinct:
            place(parameter, placement.replicated(axis))
        elif axis.size == 1:
            place(parameter, placement.sharded(distinct[id(parameter)].dim, axis))
    return module


def styles_by_name(module: nn.Module, plan: ParallelStyle | Plan | None) -> dict[str, tuple[ParallelStyle, nn.Module]]:
    """Each module that the plan names, with its style, in the order of the model."""
    if isinstance(plan, ParallelStyle):
        plan = {"": plan}
    if not plan:
        raise ValueError("parallelize_module: the plan is empty; give a style, or styles by the names of submodules")
    modules = dict(module.named_modules())
    chosen: dict[str, tuple[str, ParallelStyle]] = {}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"parallelize_module: {pattern!r} has a {type(style).__name__}; give one of labkit's styles, such as "
                "ColwiseParallel()"
            )
        matching = [name for name in modules if _matches(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, _patterns(modules), 1, 0.5)
            meant = f": did you mean {near[0]!r}?" if near else f"; its children are {', '.join(_children(module))}"
            raise ValueError(
                f"parallelize_module: the plan names {pattern!r}, and {type(module).__name__} has no such submodule"
                f"{meant}"
            )
        for name in matching:
            if name in chosen:
                raise ValueError(
                    f"parallelize_module: {chosen[name][0]!r} and {pattern!r} both give {name} a style: give it one"
                )
            chosen[name] = pattern, style
    return {name: (chosen[name][1], one) for name, one in modules.items() if name in chosen}


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _patterns(names: Mapping[str, nn.Module]) -> list[str]:
    """Names with a `*` for every number."""
    return list(dict.fromkeys(".".join("*" if one.isdecimal() else one for one in name.split(".")) for name in names))


def _children(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_children()] or ["none"]


def _refuse(module: nn.Module, cuts: list[Cut], axis: Axis) -> None:
    """What is cut must be cut wherever it is used, in one way, and once."""
    names = {id(tensor): name for name, tensor in _tensors(module).items()}
    handled = {(id(cut.module), cut.name) for cut in cuts}
    dims: dict[int, int] = {}
    for cut in cuts:
        tensor, name = cut.tensor, names[id(cut.tensor)]
        if dims.setdefault(id(tensor), cut.dim) != cut.dim:
            raise ValueError(f"parallelize_module: {name} is used twice, and the plan cuts it along two different dims")
        if any(axis.ranks == other.ranks for other in placement_of(tensor).sharded_over):
            raise ValueError(f"parallelize_module: {name} is sharded over {axis.name!r} already: share a module once")
    for owner_name, owner in module.named_modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and id(tensor) in dims and (id(owner), name) not in handled:
                raise ValueError(
                    f"parallelize_module: {owner_name}.{name} is the same tensor as {names[id(tensor)]}, which the "
                    f"plan cuts: give {owner_name!r} a style that cuts it too"
                )
    for owner_name, owner in module.named_modules():  # attention whose layers are cut one by one
        head_dim = getattr(owner, "head_dim", None)
        if not isinstance(head_dim, int):
            continue
        for child_name, child in owner.named_children():
            if isinstance(child, nn.Linear) and any(cut.tensor is child.weight and cut.dim == 0 for cut in cuts):
                check_heads(f"{owner_name}.{child_name}".lstrip("."), child, head_dim, axis)
    for name, parameter in module.named_parameters():
        if is_wrapped(parameter):
            raise ValueError(
                f"parallelize_module: {name} is under DistributedDataParallel already: share the module first, then "
                "wrap it"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _same_start(module: nn.Module, axis: Axis, source: int) -> None:
    end = endpoint(axis.group)
    if not 0 <= source < axis.size:
        raise ValueError(f"parallelize_module: src_data_rank is {source}; the axis has ranks 0 to {axis.size - 1}")
    tensors = list(_tensors(module).values())
    device = tensors[0].device
    check_same_model(module, end, device=device)
    broadcast_tensors(tensors, end, source=source)
    share_random_state(axis, device=device)
