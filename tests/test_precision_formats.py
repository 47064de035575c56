"""Number formats: every pattern and every rounding is PyTorch's; stochastic rounding is right in the mean."""

import math

import pytest
import torch

from labkit.precision import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FORMATS,
    TFLOAT32,
    Format,
    decode,
    encode,
    rounded,
    stochastic_round,
)

SMALL = [FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2]
named = pytest.mark.parametrize("form", SMALL, ids=lambda form: form.name)


def as_pytorch(patterns: torch.Tensor, form: Format) -> torch.Tensor:
    """The numbers that PyTorch reads from these bits, float32."""
    assert form.dtype is not None
    if form.bits == 8:
        return patterns.to(torch.uint8).view(form.dtype).float()
    return torch.where(patterns >= 1 << 15, patterns - (1 << 16), patterns).to(torch.int16).view(form.dtype).float()


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal numbers with equal signs (zero's too), NaN where NaN is."""
    numbers = ~theirs.isnan()
    signs = torch.equal(torch.signbit(ours)[numbers], torch.signbit(theirs)[numbers])
    return signs and torch.equal(ours[numbers], theirs[numbers]) and bool(ours[~numbers].isnan().all())


@named
def test_every_pattern_is_the_number_that_pytorch_reads(form: Format) -> None:
    patterns = torch.arange(1 << form.bits)
    assert same(decode(patterns, form), as_pytorch(patterns, form))


@named
def test_every_number_is_written_as_the_pattern_it_came_from(form: Format) -> None:
    patterns = torch.arange(1 << form.bits)
    numbers = as_pytorch(patterns, form)
    assert torch.equal(encode(numbers, form)[~numbers.isnan()], patterns[~numbers.isnan()])
    assert decode(encode(torch.tensor([math.nan]), form), form).isnan().all()


@named
def test_any_float32_is_rounded_as_pytorch_rounds_it(form: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (300_000,), generator=generator)
    anything = bits.to(torch.int32).view(torch.float32)
    powers = torch.randint(-30, 20, (300_000,), generator=generator).float()
    within_range = torch.randn(300_000, generator=generator) * torch.exp2(powers)
    for values in (anything, within_range):
        assert same(rounded(values, form), values.to(form.dtype).float())


@named
def test_ties_go_to_the_even_neighbour_and_all_else_to_the_nearer(form: Format) -> None:
    numbers = as_pytorch(torch.arange(1 << form.bits), form)
    numbers = numbers[numbers.isfinite()].unique().double()
    halfway = ((numbers[1:] + numbers[:-1]) / 2).float()
    for values in (halfway, torch.nextafter(halfway, torch.tensor(math.inf)), torch.nextafter(halfway, -halfway)):
        assert same(rounded(values, form), values.to(form.dtype).float())


@named
def test_what_is_too_large_ends_as_in_pytorch(form: Format) -> None:
    gap = form.spacing(form.max)
    edge = [form.max, form.max + 0.49 * gap, form.max + 0.5 * gap, form.max + gap, 4 * form.max, math.inf]
    values = torch.tensor([*edge, *[-one for one in edge]])
    assert same(rounded(values, form), values.to(form.dtype).float())


@pytest.mark.parametrize("form", [*SMALL, FLOAT32], ids=lambda form: form.name)
def test_range_and_spacing_are_those_of_finfo(form: Format) -> None:
    info = torch.finfo(form.dtype)
    assert (form.max, form.smallest_normal, form.eps) == (info.max, info.tiny, info.eps)
    assert form.bits == info.bits
    assert form.smallest_subnormal == info.smallest_normal * info.eps
    assert form.spacing(1.0) == form.spacing(1.99) == form.eps
    assert form.spacing(0.0) == form.spacing(form.smallest_normal / 2) == form.smallest_subnormal


@named
def test_half_of_the_smallest_number_is_zero_and_a_little_more_is_not(form: Format) -> None:
    half = torch.tensor([form.smallest_subnormal / 2])
    assert encode(half, form).item() == 0
    assert encode(half * 1.001, form).item() == 1


def test_float32_keeps_every_float32() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    values = bits.view(torch.float32)
    patterns = torch.where(bits < 0, bits.long() + (1 << 32), bits.long())
    assert torch.equal(encode(values, FLOAT32)[~values.isnan()], patterns[~values.isnan()])
    assert same(decode(patterns, FLOAT32), values)


def test_tfloat32_has_the_range_of_float32_and_the_mantissa_of_float16() -> None:
    assert (TFLOAT32.bits, TFLOAT32.eps, TFLOAT32.smallest_normal) == (19, FLOAT16.eps, FLOAT32.smallest_normal)
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(
        rounded(values, TFLOAT32), values.half().float().where(values.abs() > 1e-4, rounded(values, TFLOAT32))
    )
    assert torch.equal(rounded(torch.tensor([1e30]), TFLOAT32) == torch.tensor([1e30]), torch.tensor([False]))
    assert rounded(torch.tensor([1e30]), TFLOAT32).isfinite().all()


def test_float64_is_rounded_once() -> None:
    # just above a tie of bfloat16, by less than float32 can hold: PyTorch goes through float32 and loses it
    value = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert rounded(value, BFLOAT16).item() == 1 + 2**-7
    assert value.to(torch.bfloat16).item() == 1.0


@pytest.mark.parametrize("form", SMALL, ids=lambda form: form.name)
@pytest.mark.parametrize("base", [1.25, -0.0078125, 5.0])
def test_stochastic_rounding_is_right_in_the_mean(form: Format, base: float) -> None:
    value = base + 0.3 * form.spacing(base)  # rounding to nearest would be off by 0.3 of the spacing, always
    many = torch.full((40_000,), value)
    found = rounded(many, form, rounding="stochastic", generator=torch.Generator().manual_seed(3)).double()
    low, high = found.min().item(), found.max().item()
    gap = form.spacing(base)
    assert low <= value <= high and high - low <= gap  # one of the two neighbours each time
    # the mean of n draws of two values a gap apart is off by at most gap / (2 sqrt(n)) in one standard deviation
    assert abs(found.mean().item() - value) < 4 * gap / (2 * math.sqrt(len(many)))


def test_stochastic_rounding_leaves_alone_what_fits() -> None:
    for form in SMALL:
        numbers = decode(torch.arange(1 << form.bits), form)
        numbers = numbers[numbers.isfinite()]
        assert torch.equal(rounded(numbers, form, rounding="stochastic"), numbers)


def test_even_what_is_far_below_the_smallest_number_is_right_in_the_mean() -> None:
    tiny = torch.full((200_000,), FLOAT8_E5M2.smallest_subnormal / 1000)
    found = rounded(tiny, FLOAT8_E5M2, rounding="stochastic", generator=torch.Generator().manual_seed(4))
    assert 100 < int((found > 0).sum()) < 300
    assert not rounded(torch.full((1000,), 1e-45), FLOAT8_E5M2, rounding="stochastic").any()


def test_stochastic_round_gives_the_dtype_and_follows_its_generator() -> None:
    values = torch.randn(100)
    first, again = (stochastic_round(values, torch.bfloat16, generator=torch.Generator().manual_seed(5)) for _ in "ab")
    assert first.dtype is torch.bfloat16 and torch.equal(first, again)
    assert not torch.equal(first, values.bfloat16())


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"values are torch\.int64; give floating-point"):
        encode(torch.tensor([1]), BFLOAT16)
    with pytest.raises(TypeError, match="values are a float; give a tensor"):
        encode(1.5, BFLOAT16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the format is torch\.bfloat16; give one of labkit\.precision"):
        encode(torch.ones(1), torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"patterns are torch\.float32; give whole numbers"):
        decode(torch.tensor([1.5]), FLOAT16)
    with pytest.raises(ValueError, match=r"whole number from 0 to 2\^16 - 1"):
        decode(torch.tensor([1 << 16]), FLOAT16)
    with pytest.raises(ValueError, match="'nearest' or 'stochastic'"):
        encode(torch.tensor([1.0]), BFLOAT16, rounding="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float16 has no spacing at 70000"):
        FLOAT16.spacing(70000)
    with pytest.raises(ValueError, match="there is no format for"):
        stochastic_round(torch.ones(1), torch.float64)
    assert list(FORMATS) == ["float32", "tfloat32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3"]
