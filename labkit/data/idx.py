"""The IDX format of MNIST and its relatives, gzipped: unsigned bytes only, which is what those sets hold."""

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from labkit.data.errors import DataError


def read_idx(path: Path) -> Tensor:
    """The array of unsigned bytes in a gzipped IDX file; `DataError` where it isn't one.

    Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits", section on file formats: two zero
    bytes, the type (8 = unsigned byte), the number of dims, each size as a big-endian 32-bit integer, the values.
    """
    try:
        raw = bytearray(gzip.decompress(path.read_bytes()))  # writable memory, which torch asks for
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}): restore it.") from None
    dims = raw[3] if len(raw) > 3 else 0
    start = 4 + 4 * dims
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    if raw[:3] != b"\0\0\x08" or len(raw) != start + math.prod(shape):
        raise DataError(f"{path} is not an IDX file of unsigned bytes: restore it.")
    return torch.frombuffer(raw, dtype=torch.uint8, offset=start).reshape(shape)
