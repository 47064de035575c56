"""The casts that autocast makes: of tensors in any arguments, with a cache for weights, and float16 by rounding."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

Cast = Callable[[torch.Tensor], torch.Tensor]


class WeightCache:
    """The 16-bit copies of weights, made once and used until the outermost region ends.

    Only what a graph's gradients end at is kept: a float32 leaf that requires gradients. All uses of a copy then share
    one node in the graph. A copy is made anew after the weight has been changed in place, and never kept from a region
    without gradients, whose copies would end the graph.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, Any], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def get(self, tensor: torch.Tensor, how: Any, make: Cast) -> torch.Tensor:
        """The copy of `tensor` that `make` makes; kept under (tensor, `how`) where it may be."""
        keeps = tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32 and torch.is_grad_enabled()
        if not keeps or tensor._is_view():
            return make(tensor)
        key = id(tensor), how
        found = self._copies.get(key)
        if found is not None and found[0]() is tensor and found[1] == tensor._version:
            return found[2]
        copy = make(tensor)
        self._copies[key] = weakref.ref(tensor), tensor._version, copy
        return copy

    def clear(self) -> None:
        """Forget all copies."""
        self._copies.clear()

    def __len__(self) -> int:
        return len(self._copies)


def eligible(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether autocast touches it: floating-point, on the device, and not float64."""
    dtype = tensor.dtype
    on_device = tensor.is_cpu if device_type == "cpu" else tensor.is_cuda
    return on_device and dtype.is_floating_point and dtype is not torch.float64


def map_tensors(value: Any, change: Cast) -> Any:
    """`value` with every tensor in it changed; lists, tuples and dictionaries are gone through."""
    if isinstance(value, torch.Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(one, change) for one in value])
    if kind is dict:
        return {key: map_tensors(one, change) for key, one in value.items()}
    if isinstance(value, tuple):  # what torch.linalg returns: a tuple with names
        return kind([map_tensors(one, change) for one in value])
    return value


def widest(args: Any, device_type: str, lower: torch.dtype) -> torch.dtype:
    """float32 if any eligible tensor is float32, else the 16-bit dtype; another one is refused."""
    found = lower

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        if eligible(tensor, device_type):
            if tensor.dtype is torch.float32:
                found = torch.float32
            elif tensor.dtype is not lower:
                raise RuntimeError(
                    f"autocast to {_name(lower)} meets a {_name(tensor.dtype)} tensor: cast it to float32 or "
                    f"{_name(lower)} before it is joined with others"
                )
        return tensor

    map_tensors(args, look)
    return found


def through_float16(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, in float32; its gradient is rounded to float16 too."""
    return tensor.to(torch.float16).to(torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
