"""Buffers for what arrives, used again as soon as nobody holds them: fresh memory of some megabytes is slow to touch.

A buffer is free when the tensors made on it are gone, whoever had them: autograd, a send under way, the user. That is
seen by the array under it, which each of these tensors keeps a reference to.
"""

import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SMALL = 1 << 16  # bytes; below the allocator is quick itself
_ALIGNMENT = 64
_UNUSED = 3  # references to an array that only its pool, the loop and the call hold


class Buffers:
    """The receive buffers of a pipeline on this rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arrays: dict[int, list[Any]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of undefined values."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self.device.type != "cpu" or nbytes < _SMALL:
            return torch.empty(shape, dtype=dtype, device=self.device)
        arrays = self._arrays.setdefault(nbytes, [])
        for array in arrays:
            if sys.getrefcount(array) <= _UNUSED:
                break
        else:
            array = _aligned(nbytes)
            arrays.append(array)
        return torch.from_numpy(array).view(dtype).view(shape)


def _aligned(nbytes: int) -> Any:
    whole = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    begin = -whole.ctypes.data % _ALIGNMENT
    return whole[begin : begin + nbytes]
