"""What travels between the process that starts ranks and the ranks: functions, arguments and results, by cloudpickle.

Functions and classes defined in a notebook travel by value. Tensors come as CPU copies of what they show, not of the
storage they are cut from.
"""

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch


class Unsendable(TypeError):
    """A result that can't travel."""


def _rebuild(
    data: bytearray, dtype: torch.dtype, shape: tuple[int, ...], kind: type[torch.Tensor], grad: bool, names: Any
) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = flat.view(shape)
    tensor = torch.nn.Parameter(tensor, grad) if kind is torch.nn.Parameter else tensor.requires_grad_(grad)
    tensor.__dict__.update(names)
    return tensor


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped library
    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        if plain and obj.layout is torch.strided and not obj.is_quantized and not obj.is_meta:
            copy = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
            data: Any = b""
            if copy.numel():
                # a buffer is written as it lies, and arrives as a bytearray that the tensor there stands on
                data = pickle.PickleBuffer(copy.view(torch.uint8).numpy())
            # a result of autograd can't take its graph along
            grad = obj.requires_grad and obj.is_leaf
            return _rebuild, (data, obj.dtype, tuple(obj.shape), type(obj), grad, dict(obj.__dict__))
        return super().reducer_override(obj)


def pack(obj: Any) -> bytes:
    """The object as bytes. Raises what pickling raises."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The object that `pack` was given."""
    return cloudpickle.loads(data)


def send(connection: Connection, message: Any, load: bytes | None = None) -> None:
    """Send a message and, after it and uncopied, what it carries."""
    connection.send_bytes(pack((message, load is not None)))
    if load is not None:
        connection.send_bytes(load)


def receive(connection: Connection) -> tuple[Any, bytes]:
    """The next message and what it carries, b"" where nothing. Raises EOFError where the other side is gone."""
    message, is_loaded = unpack(connection.recv_bytes())
    return message, connection.recv_bytes() if is_loaded else b""
