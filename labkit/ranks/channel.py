"""What travels between the process that starts ranks and the ranks: functions, arguments and results, by cloudpickle.

Functions and classes defined in a notebook travel by value. Tensors come as CPU copies of what they show, not of the
storage they are cut from.
"""

import io
from typing import Any

import cloudpickle
import torch


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool, grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    return torch.nn.Parameter(tensor, grad) if parameter else tensor.requires_grad_(grad)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped library
    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        if plain and obj.layout is torch.strided and not obj.is_quantized and not obj.is_meta:
            copy = obj.detach().cpu().contiguous().flatten()
            data = copy.view(torch.uint8).numpy().tobytes() if copy.numel() else b""
            parameter = isinstance(obj, torch.nn.Parameter)
            # a result of autograd can't take its graph along
            grad = obj.requires_grad and obj.is_leaf
            return _rebuild, (data, obj.dtype, tuple(obj.shape), parameter, grad)
        return super().reducer_override(obj)


def pack(obj: Any) -> bytes:
    """The object as bytes. Raises what pickling raises."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The object that `pack` was given."""
    return cloudpickle.loads(data)
