"""Floating-point formats by their bits: a sign, an exponent, a mantissa, and what the largest exponent means.

Sources: IEEE 754-2019, section 3.4 (binary16, binary32); bfloat16: Kalamkar and others, A Study of BFLOAT16 for Deep
Learning Training, arXiv:1905.12322, section 3; tfloat32: NVIDIA A100 Tensor Core GPU Architecture, 2020; float8:
Micikevicius and others, FP8 Formats for Deep Learning, arXiv:2209.05433, table 1.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    A pattern is sign, exponent, mantissa, from the highest bit down. With exponent field e and mantissa field m a
    number is (-1)^sign 2^(e - bias) (1 + m / 2^mantissa_bits), or where e is 0 a subnormal one,
    (-1)^sign 2^(1 - bias) m / 2^mantissa_bits.

    Args:
        name: what it is called.
        exponent_bits, mantissa_bits: the widths of the fields, without the sign's one bit.
        infinities: whether the largest exponent is kept for infinity (m = 0) and NaN, as IEEE 754 has it. If not, only
            the pattern of all ones is NaN, and there is no infinity: float8 e4m3.
        dtype: PyTorch's dtype, None if it has none (tfloat32 exists inside of tensor cores only).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    infinities: bool = True
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """The width of a pattern."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest_exponent(self) -> int:
        """The power of two of the largest finite number."""
        return (1 << self.exponent_bits) - 1 - self.bias - (1 if self.infinities else 0)

    @property
    def smallest_exponent(self) -> int:
        """The power of two of the smallest normal number."""
        return 1 - self.bias

    @property
    def max(self) -> float:
        """The largest finite number."""
        # without infinities the mantissa of all ones is NaN's
        last = 1 if self.infinities else 2
        return float(2.0**self.largest_exponent * (2 - last * 2.0**-self.mantissa_bits))

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with full precision."""
        return float(2.0**self.smallest_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number; what is at most half of it is rounded to 0."""
        return float(2.0 ** (self.smallest_exponent - self.mantissa_bits))

    @property
    def eps(self) -> float:
        """The distance from 1 to the next number, as torch.finfo."""
        return float(2.0**-self.mantissa_bits)

    def spacing(self, value: float) -> float:
        """The distance between neighbouring numbers of this format around `value`, below the next power of two."""
        if not math.isfinite(value) or abs(value) > self.max:
            raise ValueError(f"{self.name} has no spacing at {value}: give a number between -{self.max} and {self.max}")
        exponent = self.smallest_exponent
        if value:
            exponent = max(exponent, math.frexp(value)[1] - 1)
        return float(2.0 ** (exponent - self.mantissa_bits))


FLOAT32 = Format("float32", 8, 23, dtype=torch.float32)
TFLOAT32 = Format("tfloat32", 8, 10)
FLOAT16 = Format("float16", 5, 10, dtype=torch.float16)
BFLOAT16 = Format("bfloat16", 8, 7, dtype=torch.bfloat16)
FLOAT8_E5M2 = Format("float8_e5m2", 5, 2, dtype=torch.float8_e5m2)
FLOAT8_E4M3 = Format("float8_e4m3", 4, 3, infinities=False, dtype=torch.float8_e4m3fn)

#: All of them by name, the widest first.
FORMATS = {one.name: one for one in (FLOAT32, TFLOAT32, FLOAT16, BFLOAT16, FLOAT8_E5M2, FLOAT8_E4M3)}


def format_of(dtype: torch.dtype) -> Format:
    """The format of one of PyTorch's dtypes."""
    for one in FORMATS.values():
        if one.dtype is dtype:
            return one
    raise ValueError(f"there is no format for {dtype}: give float32, float16, bfloat16, float8_e4m3fn or float8_e5m2")
