"""The header that travels before each payload, so that shapes and dtypes are checked between the ranks.

gloo fills a buffer half on a short message, reinterprets a wrong dtype, and ends the process on a long message. So a
payload travels under a tag made of what it is: one that does not fit never meets the other side's buffer, and the
header says what was sent instead. Headers are control traffic: recorded, but counted apart.
"""

import zlib
from dataclasses import dataclass

import torch

#: int64 words of a header: magic, dtype, bytes, dims, eight sizes, arrival (seconds times 1e9)
WORDS = 13
_MAGIC = 0x6C61626B6974
_DIMS = 8
_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
_HEADER_TAG, _PAYLOAD_TAG = 1 << 29, 1 << 30
#: tags of callers lie below; those from here on belong to the collectives
MAX_TAG = 1 << 28


@dataclass(frozen=True)
class Header:
    """What is sent: dtype, shape, and when the emulated network delivers it (0: at once)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    arrival: float = 0.0

    def encode(self) -> torch.Tensor:
        """int64 [WORDS]."""
        sizes = list(self.shape[:_DIMS]) + [0] * (_DIMS - len(self.shape))
        words = [_MAGIC, _DTYPES.index(self.dtype), 0, len(self.shape), *sizes, int(self.arrival * 1e9)]
        return torch.tensor(words, dtype=torch.int64)

    @staticmethod
    def decode(words: torch.Tensor) -> "Header":
        """From int64 [WORDS]."""
        values = words.tolist()
        if values[0] != _MAGIC:
            raise RuntimeError("a message without labkit's header arrived: send and receive it with the same library")
        return Header(_DTYPES[values[1]], tuple(values[4 : 4 + values[3]]), values[12] / 1e9)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def header_of(tensor: torch.Tensor, *, arrival: float = 0.0) -> Header:
    """The header for a tensor. More than eight dims or an unknown dtype is refused."""
    if tensor.dim() > _DIMS:
        raise ValueError(f"a tensor of {tensor.dim()} dims can't be sent; flatten it to at most {_DIMS}")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"a tensor of dtype {tensor.dtype} can't be sent; convert it first")
    return Header(tensor.dtype, tuple(tensor.shape), arrival)


def header_tag(tag: int) -> int:
    """The tag under which headers for the caller's `tag` travel."""
    return _HEADER_TAG + tag


def payload_tag(tag: int, tensor: torch.Tensor, *, checked: bool) -> int:
    """The tag of a payload: unless unchecked it depends on dtype and shape, so that only equals meet."""
    if not checked:
        return _PAYLOAD_TAG + tag
    words = f"{tag} {_DTYPES.index(tensor.dtype)} {tuple(tensor.shape)}".encode()
    return _PAYLOAD_TAG + zlib.crc32(words) % _PAYLOAD_TAG
