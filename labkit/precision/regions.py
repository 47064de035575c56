"""The state of autocast in this thread, and the torch-function mode that acts on it.

A torch-function mode sees each call of PyTorch's Python interface before autograd does, so that casts become a part of
the graph and their gradients are cast back. A dispatch mode would sit below autograd: the graph would be recorded with
the operation's original inputs, and backward would meet other dtypes than it was recorded with.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from labkit.precision.casts import Cast, WeightCache, eligible, map_tensors, through_float16, widest
from labkit.precision.policies import DEPENDS, FULL, FULL_OUTPUT, LOWER, policies


@dataclass(frozen=True)
class Region:
    """What autocast does on one device type."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    caches: bool
    emulates: bool
    table: Mapping[Any, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", policies(self.device_type) if self.enabled else {})


@dataclass(frozen=True)
class AutocastState:
    """What autocast does in a thread at one moment. `restore()` brings it back, whatever is in force then."""

    regions: tuple[Region, ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether any device type is autocast."""
        return any(region.enabled for region in self.regions)

    def of(self, device_type: str) -> Region | None:
        """The innermost region of a device type, None outside of any."""
        return next((region for region in self.regions if region.device_type == device_type), None)

    @contextmanager
    def restore(self) -> Iterator[None]:
        """A block in which this state is in force, as in the recomputation of a checkpoint during backward."""
        with entered(self):
            yield


@dataclass
class _Local(threading.local):
    state: AutocastState = AutocastState()
    depth: int = 0
    cache: WeightCache = field(default_factory=WeightCache)
    opening: list[Any] = field(default_factory=list)


_local = _Local()


def autocast_state() -> AutocastState:
    """What autocast does in this thread now. Take it in forward and `restore()` it in a recomputation."""
    return _local.state


def cached_weights() -> int:
    """How many 16-bit copies of weights are kept in this thread; 0 outside of autocast."""
    return len(_local.cache)


@contextmanager
def entered(state: AutocastState) -> Iterator[None]:
    """A block in which `state` is in force. The mode is pushed where it isn't already on PyTorch's stack."""
    before, _local.state = _local.state, state
    _local.depth += 1
    # the stack itself is asked: inside of a handler PyTorch has taken the mode off
    push = state.enabled and not any(isinstance(mode, _Mode) for mode in _get_current_function_mode_stack())
    mode = _Mode() if push else None
    if mode is not None:
        mode.__enter__()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _local.state = before
        _local.depth -= 1
        if not _local.depth:
            _local.cache.clear()


class _Mode(TorchFunctionMode):
    """Treats every call by the lists of the regions in force."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for region in _local.state.regions:
            policy = region.table.get(func)
            if policy is not None and kwargs.get("out") is None:
                result = _treated(func, policy, region, args, kwargs)
                if result is not NotImplemented:
                    return result
        if isinstance(func, FunctionType) and _local.state.enabled:
            return self._opened(func, args, kwargs)
        return func(*args, **kwargs)

    def _opened(self, func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function written in Python with the mode back in force, for the calls that it is made of."""
        opened = _without_question(func)
        # it may call itself once, as torch.einsum does; one that asks again and again is run as it is
        if opened is None or _local.opening.count(func) > 1:
            return func(*args, **kwargs)
        _local.opening.append(func)
        try:
            with self:
                return opened(*args, **kwargs)
        finally:
            _local.opening.pop()


_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_opened: dict[FunctionType, FunctionType | None] = {}


def _without_question(func: FunctionType) -> FunctionType | None:
    """`func` without its first question, whether a mode wants to treat the call: the answer would be yes for ever.

    Where `func` only chooses between two functions that ask (as F.max_pool2d does), it is they that don't. None if
    nobody asks.
    """
    if func not in _opened:
        _opened[func] = None  # for one that holds itself
        asked = [name for name in _QUESTIONS if name in func.__code__.co_names]
        cells = func.__closure__ or ()
        choices = [cell.cell_contents if _is_full(cell) else None for cell in cells]
        others = [_without_question(one) if isinstance(one, FunctionType) else None for one in choices]
        copy = None
        if asked or any(others):
            closure = tuple(CellType(other) if other else cell for other, cell in zip(others, cells, strict=True))
            names = {**func.__globals__, **dict.fromkeys(asked, _no)}
            copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, closure)
            copy.__kwdefaults__ = func.__kwdefaults__
        _opened[func] = copy
    return _opened[func]


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that has no value yet
        return False


def _no(*_: Any) -> bool:
    return False


def _treated(
    func: Callable[..., Any], policy: str, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The call with its tensors cast; NotImplemented if none of them is the region's business."""
    depends = DEPENDS.get(func)
    if depends is not None and not depends(args):
        return NotImplemented
    if policy == FULL_OUTPUT:
        first = args[0] if args else kwargs.get("input", kwargs.get("self"))
        given = kwargs.get("dtype") is not None or any(isinstance(one, torch.dtype) for one in args)
        if given or not isinstance(first, torch.Tensor) or not eligible(first, region.device_type):
            return NotImplemented
        return func(*args, **{**kwargs, "dtype": torch.float32})
    emulates = policy == LOWER and region.emulates
    if policy == LOWER:
        target = region.dtype
    elif policy == FULL:
        target = torch.float32
    else:
        target = widest((args, kwargs), region.device_type, region.dtype)
    device_type, caches, touched = region.device_type, region.caches and target is not torch.float32, False

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal touched
        if not eligible(tensor, device_type):
            return tensor
        touched = True
        if tensor.dtype is target and not emulates:
            return tensor
        make: Cast = through_float16 if emulates else _to[target]
        return _local.cache.get(tensor, target, make) if caches else make(tensor)

    cast_args = map_tensors(args, cast)
    cast_kwargs = map_tensors(kwargs, cast) if kwargs else kwargs
    if not touched:
        return NotImplemented
    result = func(*cast_args, **cast_kwargs)
    return map_tensors(result, _to[torch.float16]) if emulates else result


def _caster(dtype: torch.dtype) -> Cast:
    return lambda tensor: tensor.to(dtype)


_to = {dtype: _caster(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
