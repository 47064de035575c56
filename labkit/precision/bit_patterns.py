"""Numbers to bit patterns and back, in whole-number arithmetic: what a conversion in hardware does.

A number is taken apart as significand times a power of two. The significand loses the bits that the format has no room
for; what is lost decides, with ties to the even neighbour, whether the rest is raised by one (IEEE 754-2019, 4.3.1).
"""

from typing import Literal

import torch
from torch import Tensor

from labkit.precision.formats import Format, format_of

Rounding = Literal["nearest", "stochastic"]

_MANTISSA, _BIAS = 52, 1023  # of float64, in which every number of every format here is exact
_MOST = 62  # bits that can be shifted away in an int64


def encode(
    values: Tensor, to: Format, *, rounding: Rounding = "nearest", generator: torch.Generator | None = None
) -> Tensor:
    """The patterns of `to` for floating-point `values` of any shape, int64 of the same shape.

    "nearest" rounds to the nearest number, of two equally near to the one with an even last bit. "stochastic" rounds up
    with the probability of the part that is cut off, so that the mean over many roundings is the number itself (Gupta
    and others, arXiv:1502.02551, section 3).

    What is larger than the largest number after rounding becomes infinity. In a format without infinities it becomes
    the largest number, infinity too: the saturating conversion of the OCP 8-bit specification (2023, section 5.2.1),
    and PyTorch's since 2.14. Every NaN becomes the one with only the highest bit of its mantissa set, or all ones where
    there is but one.
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"encode: rounding is {rounding!r}; give 'nearest' or 'stochastic'")
    if not isinstance(to, Format):
        raise TypeError(f"encode: the format is {to!r}; give one of labkit.precision, such as BFLOAT16")
    if not isinstance(values, Tensor):
        raise TypeError(f"encode: values are a {type(values).__name__}; give a tensor of floating-point numbers")
    if not values.is_floating_point():
        raise ValueError(f"encode: values are {values.dtype}; give floating-point numbers")
    raw = values.detach().to(torch.float64).contiguous().view(torch.int64)
    negative = raw < 0
    field = (raw >> _MANTISSA) & 0x7FF
    fraction = raw & ((1 << _MANTISSA) - 1)
    significand = torch.where(field > 0, fraction | (1 << _MANTISSA), fraction)
    exponent = field.clamp(min=1) - _BIAS
    # numbers below the smallest normal share its exponent, and so lose more bits: they are the subnormals
    target = exponent.clamp(min=to.smallest_exponent)
    lost = _MANTISSA - to.mantissa_bits + target - exponent
    kept = _cut(significand, lost, rounding, generator)
    # the significand's leading bit adds one to the exponent field below it; so does a carry, and a subnormal has none
    pattern = ((target - to.smallest_exponent) << to.mantissa_bits) + kept
    largest = largest_pattern(to)
    beyond = largest + 1 if to.infinities else largest
    nan = (largest + 1) | (1 << (to.mantissa_bits - 1)) if to.infinities else largest + 1
    pattern = torch.where((pattern > largest) | (field == 0x7FF), beyond, pattern)
    pattern = torch.where((field == 0x7FF) & (fraction != 0), nan, pattern)
    return pattern | (negative.to(torch.int64) << (to.bits - 1))


def largest_pattern(to: Format) -> int:
    """The pattern of the largest finite number: one below that of infinity, or of NaN where there is no infinity."""
    ones = (1 << (to.bits - 1)) - 1
    return ones - (1 << to.mantissa_bits) if to.infinities else ones - 1


def _cut(significand: Tensor, lost: Tensor, rounding: str, generator: torch.Generator | None) -> Tensor:
    """The significand without its `lost` lowest bits, rounded."""
    excess = (lost - _MOST).clamp(min=0)  # a number so small that even the place of its first bit is far below
    significand, lost = significand >> excess.clamp(max=_MOST), lost - excess
    if rounding == "stochastic":
        random = torch.randint(1 << _MOST, significand.shape, generator=generator, device=significand.device)
        return (significand + (random & ((1 << lost) - 1))) >> lost
    kept = significand >> lost
    rest = significand & ((1 << lost) - 1)
    half = (torch.ones_like(lost) << lost) >> 1
    up = (rest > half) | ((rest == half) & (half > 0) & (kept % 2 == 1))
    return kept + up.to(torch.int64)


def decode(patterns: Tensor, form: Format) -> Tensor:
    """The numbers, float32, that these patterns (whole numbers from 0 to 2^bits - 1) are in the format."""
    if patterns.is_floating_point():
        raise ValueError(f"decode: patterns are {patterns.dtype}; give whole numbers, as encode() returns")
    patterns = patterns.to(torch.int64)
    if bool(((patterns < 0) | (patterns >= 1 << form.bits)).any()):
        raise ValueError(f"decode: a pattern of {form.name} is a whole number from 0 to 2^{form.bits} - 1")
    field = (patterns >> form.mantissa_bits) & ((1 << form.exponent_bits) - 1)
    mantissa = patterns & ((1 << form.mantissa_bits) - 1)
    significand = torch.where(field > 0, mantissa | (1 << form.mantissa_bits), mantissa).to(torch.float64)
    power = field.clamp(min=1) - form.bias - form.mantissa_bits
    magnitude = torch.ldexp(significand, power)
    unsigned = patterns & ((1 << (form.bits - 1)) - 1)
    largest = largest_pattern(form)
    magnitude = torch.where(unsigned > largest, torch.nan, magnitude)
    if form.infinities:
        magnitude = torch.where(unsigned == largest + 1, torch.inf, magnitude)
    return torch.where(patterns >> (form.bits - 1) == 1, -magnitude, magnitude).to(torch.float32)


def rounded(
    values: Tensor, to: Format, *, rounding: Rounding = "nearest", generator: torch.Generator | None = None
) -> Tensor:
    """`values` as the format holds them, in float32: encoded and decoded. Without a gradient."""
    return decode(encode(values, to, rounding=rounding, generator=generator), to)


def stochastic_round(values: Tensor, dtype: torch.dtype, *, generator: torch.Generator | None = None) -> Tensor:
    """`values` in `dtype`, rounded up or down at random so that the mean is right; see `encode`."""
    return rounded(values, format_of(dtype), rounding="stochastic", generator=generator).to(dtype)
