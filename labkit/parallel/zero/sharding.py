"""`fully_shard`: stage 3. A rank holds 1/N of all: parameters, gradients, optimizer state.

Sources: S. Rajbhandari and others, ZeRO (SC20), arXiv:1910.02054, section 5.3; Y. Zhao and others, PyTorch FSDP (VLDB
2023), arXiv:2304.11277.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from labkit.mesh.axes import AxisLike
from labkit.parallel.data_parallel.marking import is_wrapped
from labkit.parallel.data_parallel.outputs import tensors_in
from labkit.parallel.zero.course import Course, in_backward
from labkit.parallel.zero.flat_parameters import FlatParameters, Slot
from labkit.parallel.zero.hybrid import ShardingAxes
from labkit.parallel.zero.materialising import materialise
from labkit.parallel.zero.refusing import refuse_bad_algorithm, refuse_bad_sharding, refuse_bad_slot
from labkit.parallel.zero.unit import Unit

AnyModule = TypeVar("AnyModule", bound=nn.Module)

_units: "dict[type, type]" = {}
#: parameters that were sharded, and the pieces that replaced them, so that a second unit can refuse both
_sharded = WeakTensorKeyDictionary()


def fully_shard(
    module: AnyModule,
    *,
    mesh: AxisLike = None,
    reshard_after_forward: bool | None = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    prefetch: bool = True,
    find_unused_parameters: bool = False,
    algorithm: str = "ring",
    initialise: Callable[[nn.Module], None] | None = None,
) -> AnyModule:
    """Make `module` a unit whose parameters are whole only while it computes; changes it in place and returns it.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)                                   # what is left: the root unit
        optimizer = torch.optim.AdamW(model.parameters())    # steps this rank's pieces

    A unit takes the parameters that are in no unit inside of it, so begin with the inner ones. Parameters become flat
    pieces [n], of which each rank has equally many elements of a unit; some may be empty. In forward they are replaced
    by whole ones, gathered just before and freed just after, and so they are in backward. Of P elements over N ranks a
    rank sends 3 P (N - 1) / N a step, padding of less than N a unit (and of less than 64 bytes a parameter whose size
    is not a multiple of that) apart.

    Args:
        module: the same on every rank. Parameters and buffers are set to those of the first rank.
        mesh: the ranks to shard over: a group, a mesh of one axis, None for the world; with a mesh of two axes the
            first replicates and the second shards.
        reshard_after_forward: free the parameters between forward and backward; False keeps them, for memory of P
            elements, and sends 2 P (N - 1) / N. None frees those of all units but the root, whose backward comes next.
        param_dtype: gather and compute in this dtype, from shards in their own; inputs are cast.
        reduce_dtype: reduce gradients in this one; `param_dtype` if not given.
        prefetch: gather the next unit's while this one computes.
        find_unused_parameters: let a rank leave out parameters that others use. Costs one byte a parameter and step.
            A whole unit is used by all ranks or by none.
        algorithm: of the reduction, "ring" or "naive", which sums in rank order.
        initialise: where parameters are on the meta device, called with `module` when they have memory, but no values;
            else every module's own `reset_parameters` is. The whole model is never there.

    Gradients appear in the pieces when backward is through. `module.no_sync()` accumulates whole ones on each rank
    (zeros, which take no room, stand in the pieces meanwhile); without it every backward is reduced. They are those of
    losses that weigh ranks alike, divided by N, as in data parallel. Buffers are not synchronised in training.

    A wrong argument or model is a ValueError or TypeError, what goes wrong in training a RuntimeError.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard: module is a {type(module).__name__}; give an nn.Module")
    if hasattr(module, "_labkit_unit"):
        raise ValueError("fully_shard: this module is a unit already; shard it once")
    refuse_bad_algorithm(algorithm, "fully_shard")
    refuse_bad_sharding(reshard_after_forward, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    axes = ShardingAxes.of(mesh)
    slots = list(_slots(module))
    materialise(module, _own_modules(module), slots, initialise)
    for buffer in (buffer for one in _own_modules(module) for buffer in one._buffers.values() if buffer is not None):
        axes.spread(buffer)
    alike: dict[Any, list[Slot]] = {}
    for slot in slots:
        alike.setdefault((slot.original.dtype, slot.original.device, slot.original.requires_grad), []).append(slot)
    flats = [
        FlatParameters(some, axes, param_dtype=param_dtype, reduce_dtype=reduce_dtype, algorithm=algorithm)
        for some in alike.values()
    ]
    unit = Unit("", module, flats, reshard=reshard_after_forward is not False, find_unused=find_unused_parameters)
    for flat in flats:
        for slot, piece in zip(flat.slots, flat.pieces, strict=True):
            _sharded[slot.original] = _sharded[piece] = slot.name
        for index, parameter in enumerate(flat.unsharded):
            parameter.register_post_accumulate_grad_hook(_ready(unit, flat, index))
        flat.install(flat.pieces)
        for slot, piece in zip(flat.slots, flat.pieces, strict=True):
            slot.original = piece  # lets go of the whole one
    hooks = _Hooks(unit, axes, prefetch=prefetch, keep_root=reshard_after_forward is None, param_dtype=param_dtype)
    module.register_forward_pre_hook(hooks.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(hooks.after_forward, with_kwargs=True, always_call=True)
    module.__dict__["_labkit_unit"] = hooks
    cls = type(module)
    if cls not in _units:
        _units[cls] = type(f"FullySharded{cls.__name__}", (FullyShardedModule, cls), {})
    module.__class__ = _units[cls]
    return module


class FullyShardedModule:
    """What a module that `fully_shard` has changed can do besides."""

    _labkit_unit: "_Hooks"  # in the module's __dict__

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate gradients, whole on each rank; the next one outside averages their sum."""
        with self._labkit_unit.the_course().no_sync():
            yield

    @property
    def process_group(self) -> Any:
        """The group that gradients are averaged over; None, the world, where two axes share it."""
        axes = self._labkit_unit.axes
        return axes.shard.group if axes.replicate is None else None

    @property
    def sharded_units(self) -> list[Unit]:
        """The units in this module, itself the first."""
        return self._labkit_unit.the_course().units

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a module in shards belongs to its ranks and can't be copied: copy it first, then shard both")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a module in shards belongs to its ranks and can't be saved or sent: take labkit.parallel.zero.full_state"
        )


class _Hooks:
    """What happens around a unit's forward."""

    def __init__(
        self, unit: Unit, axes: ShardingAxes, *, prefetch: bool, keep_root: bool, param_dtype: torch.dtype | None
    ) -> None:
        self.axes = axes
        self.unit, self.prefetch, self.keep_root, self.param_dtype = unit, prefetch, keep_root, param_dtype
        self.course: Course | None = None
        self.computes = False

    def the_course(self) -> Course:
        """That of the outermost unit which has been called, or asked, so far."""
        if self.course is None:
            units: list[Unit] = []
            found: list[_Hooks] = []
            for name, module in self.unit.module.named_modules():
                if hasattr(module, "_labkit_unit"):
                    hooks: _Hooks = module._labkit_unit
                    hooks.unit.name = name
                    units.append(hooks.unit)
                    found.append(hooks)
            self.course = Course(self.unit, units, prefetch=self.prefetch)
            for hooks in found:
                hooks.course = self.course
            if self.keep_root:
                self.unit.reshard = False
        return self.course

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        course = self.the_course()
        if course.root is self.unit and not in_backward():
            course.begin_forward()
        course.enter(self.unit)
        if not any(flat.is_trained for flat in self.unit.flats) and self.unit.flats:
            for tensor in tensors_in([args, kwargs]):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: course.pass_inputs(self.unit))
        if self.param_dtype is None:
            return None
        return _cast(args, self.param_dtype), _cast(kwargs, self.param_dtype)

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        course, seen, needed = self.the_course(), False, False
        if torch.is_grad_enabled() and not (in_backward() and self.unit.is_active):
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    seen = True
                    tensor.register_hook(lambda _: course.reach(self.unit))
            needed = output is not None and any(flat.is_trained for flat in self.unit.flats)
        course.leave(self.unit, keep=needed and not seen)


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside of it that are in no unit of their own."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen or (one is not module and hasattr(one, "_labkit_unit")):
            continue
        seen.add(id(one))
        yield one
        waiting.extend(one.children())


def _slots(module: nn.Module) -> Iterator[Slot]:
    """The parameters that a unit of `module` takes, each once."""
    own = {id(one) for one in _own_modules(module)}
    slots: dict[int, Slot] = {}
    for prefix, one in module.named_modules():
        if id(one) not in own:
            continue
        for name, parameter in one._parameters.items():
            if parameter is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            if id(parameter) not in slots:
                refuse_bad_slot(full, parameter, wrapped=is_wrapped(parameter), sharded=parameter in _sharded)
                slots[id(parameter)] = Slot(full, parameter)
            slots[id(parameter)].owners.append((one, name))
    yield from slots.values()


def _ready(unit: Unit, flat: FlatParameters, index: int) -> Callable[[torch.Tensor], None]:
    def ready(_: torch.Tensor) -> None:
        unit.ready(flat, index)

    return ready


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors in tuples, lists and dicts as `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    return value
