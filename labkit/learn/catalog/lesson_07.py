"""Lesson 07: a number in bfloat16, and the scaler's update."""

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

# --- encode a number in bfloat16 ---

NUMBERS = (
    (1.0, -2.5, 0.0, -0.0, 96.0, 2.0**-126),
    (1.01, -3.14159265, 0.1, 1e-3, 12345.678, 6.02e23),
    (1.00390625, 1.01171875, -1.00390625, -1.01171875, 1.99609375, 3.9921875, 1.013),
    (math.inf, -math.inf, 3.4e38, 1e-40, -1e-45, 2.0**-133),
)


def numbers_0(rank: int, world_size: int) -> tuple[Any, ...]:
    return (NUMBERS[0],)


def numbers_1(rank: int, world_size: int) -> tuple[Any, ...]:
    return (NUMBERS[1],)


def numbers_2(rank: int, world_size: int) -> tuple[Any, ...]:
    return (NUMBERS[2],)


def numbers_3(rank: int, world_size: int) -> tuple[Any, ...]:
    return (NUMBERS[3],)


def each_number(function: Callable[..., Any], numbers: tuple[float, ...]) -> list[int]:
    """The pattern of each number."""
    patterns = []
    for number in numbers:
        pattern = function(number)
        try:  # NumPy's whole numbers are as good
            whole = operator.index(pattern)
        except TypeError:
            whole = None
        if whole is None or isinstance(pattern, bool):
            raise Nonsense(describe(pattern), _("a whole number, the 16 bits"))
        patterns.append(whole)
    return patterns


def float32_bits(number: float) -> int:
    """The 32 bits of a number as float32; too large a one is infinity."""
    try:
        return int(struct.unpack(">I", struct.pack(">f", number))[0])
    except OverflowError:
        return 0xFF800000 if number < 0 else 0x7F800000


def truth(number: float) -> int:
    """Rounded to nearest, ties to even."""
    bits = float32_bits(number)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def truncates(number: float) -> int:
    return float32_bits(number) >> 16


def rounds_half_up(number: float) -> int:
    return (float32_bits(number) + 0x8000) >> 16


def rounds_half_down(number: float) -> int:
    return (float32_bits(number) + 0x7FFF) >> 16


def forgets_the_sign(number: float) -> int:
    return truth(abs(number))


def swaps_the_bytes(number: float) -> int:
    pattern = truth(number)
    return pattern >> 8 | (pattern & 0xFF) << 8


def takes_float16(number: float) -> int:
    try:
        return int(struct.unpack(">H", struct.pack(">e", number))[0])
    except OverflowError:
        return 0xFC00 if number < 0 else 0x7C00


def rounds_away_from_zero(number: float) -> int:
    return (float32_bits(number) + 0xFFFF) >> 16


def makes_subnormals_zero(number: float) -> int:
    return truth(number if abs(number) >= 2.0**-126 else math.copysign(0.0, number))


def _bits_cause(numbers: tuple[float, ...], found: list[int]) -> str:
    if not all(0 <= one < 1 << 16 for one in found):
        return _("a pattern of 16 bits is a whole number from 0 to 65535")
    slips: tuple[tuple[Callable[[float], int], str], ...] = (
        (truncates, _("the lower 16 bits are cut off, where they should decide about rounding up")),
        (rounds_half_up, _("exactly halfway it goes up; it should go to the neighbour whose last bit is 0")),
        (rounds_half_down, _("exactly halfway it goes down; it should go to the neighbour whose last bit is 0")),
        (rounds_away_from_zero, _("it always goes away from zero, where the nearest may lie on the other side")),
        (forgets_the_sign, _("the sign is lost")),
        (swaps_the_bytes, _("the two bytes are the wrong way round")),
        (takes_float16, _("that is float16, with 5 bits of exponent; bfloat16 has the 8 of float32")),
        (makes_subnormals_zero, _("numbers below 2^-126 are not all zero: there are subnormal ones")),
    )
    return next((words for slip, words in slips if [slip(number) for number in numbers] == found), "")


def _patterns(outcome: Outcome) -> Finding:
    (numbers,) = outcome.inputs(0)
    every = outcome.values[0]
    for number, found in zip(numbers, every, strict=True):
        if found != truth(number):
            wanted = _("{number} is {bits}").format(number=number, bits=f"{truth(number):016b}")
            shown = f"{found:016b}" if found >= 0 else str(found)
            return Finding(False, wanted, shown, _bits_cause(numbers, every))
    return Finding(True)


register(
    Exercise(
        id="bfloat16-bits",
        lesson="07",
        title=_("Encode a number in bfloat16"),
        dots=2,
        minutes=12,
        answer="bfloat16_bits",
        hints=(
            _("bfloat16 is the upper half of float32. `struct.unpack('>I', struct.pack('>f', number))[0]` gives the 32 "
              "bits of a float32 as a whole number."),
            _("Shifting by 16 cuts off. To round to the nearest, add something first, so that the carry does it. "
              "Adding 0x8000 rounds exactly half up."),
            _("Halfway the last bit that is kept decides: add 0x7FFF, and one more if bit 16 is set."),
        ),
        properties=(
            Property("bits", _("the 16 bits are those of the nearest number, of the even one halfway"), _patterns),
        ),
        trials=(
            Trial(_("numbers that fit"), 1, numbers_0, each_number, ("numbers",)),
            Trial(_("numbers in between"), 1, numbers_1, each_number, ("numbers",)),
            Trial(_("numbers exactly halfway"), 1, numbers_2, each_number, ("numbers",)),
            Trial(_("very large and very small"), 1, numbers_3, each_number, ("numbers",)),
        ),
        wrong_answers=(
            WrongAnswer("cuts off", truncates, "bits", "cut off"),
            WrongAnswer("rounds half up", rounds_half_up, "bits", "goes up"),
            WrongAnswer("rounds half down", rounds_half_down, "bits", "goes down"),
            WrongAnswer("rounds away from zero", rounds_away_from_zero, "bits", "always goes away from zero"),
            WrongAnswer("forgets the sign", forgets_the_sign, "bits", "sign is lost"),
            WrongAnswer("swaps the bytes", swaps_the_bytes, "bits", "wrong way round"),
            WrongAnswer("takes float16", takes_float16, "bits", "that is float16"),
            WrongAnswer("has no subnormals", makes_subnormals_zero, "bits", "subnormal"),
        ),
    )
)  # fmt: skip

# --- the scaler's update ---

INTERVAL = 3


def course_0(rank: int, world_size: int) -> tuple[Any, ...]:
    return ((False,) * 10,)


def course_1(rank: int, world_size: int) -> tuple[Any, ...]:
    return ((True, True, False, False, True, False, False, False, False),)


def course_2(rank: int, world_size: int) -> tuple[Any, ...]:
    return ((False, False, False, True, False, False, True, False, False, False),)


def scales_of(function: Callable[..., Any], course: tuple[bool, ...]) -> list[float]:
    """The scale after each step of a course of overflows, from 1024 on."""
    scale, clean, scales = 1024.0, 0, []
    for overflow in course:
        answer = function(scale, clean, overflow, INTERVAL)
        numbers = isinstance(answer, tuple | list) and all(isinstance(one, int | float) for one in answer)
        if not numbers or len(answer) != 2:
            raise Nonsense(describe(answer), _("two numbers: the scale, and the clean steps since it changed"))
        scale, clean = answer
        scales.append(float(scale))
    return scales


def right_update(scale: float, clean: int, overflow: bool, interval: int) -> tuple[float, int]:
    if overflow:
        return scale / 2, 0
    return (scale * 2, 0) if clean + 1 == interval else (scale, clean + 1)


def keeps_counting_after_an_overflow(scale: float, clean: int, overflow: bool, interval: int) -> tuple[float, int]:
    return (scale / 2, clean) if overflow else right_update(scale, clean, overflow, interval)


def grows_one_late(scale: float, clean: int, overflow: bool, interval: int) -> tuple[float, int]:
    if overflow:
        return scale / 2, 0
    return (scale * 2, 0) if clean == interval else (scale, clean + 1)


def grows_ever_after(scale: float, clean: int, overflow: bool, interval: int) -> tuple[float, int]:
    if overflow:
        return scale / 2, 0
    return (scale * 2 if clean + 1 >= interval else scale), clean + 1


def never_shrinks(scale: float, clean: int, overflow: bool, interval: int) -> tuple[float, int]:
    return (scale, 0) if overflow else right_update(scale, clean, overflow, interval)


def starts_over(scale: float, clean: int, overflow: bool, interval: int) -> tuple[float, int]:
    return (1.0, 0) if overflow else right_update(scale, clean, overflow, interval)


def swaps_the_two(scale: float, clean: int, overflow: bool, interval: int) -> tuple[float, float]:
    new, count = right_update(scale, clean, overflow, interval)
    return count, new


def halves_and_counts(scale: float, clean: int, overflow: bool, interval: int) -> tuple[float, int]:
    return (scale / 2, 1) if overflow else right_update(scale, clean, overflow, interval)


def _scales_cause(course: tuple[bool, ...], found: list[float]) -> str:
    slips: tuple[tuple[Callable[..., Any], str], ...] = (
        (keeps_counting_after_an_overflow, _("an overflow ends the row of clean steps: their count begins anew")),
        (grows_one_late, _("it grows one step late: this clean step counts too")),
        (grows_ever_after, _("after growing, the count begins anew; else it grows in every step")),
        (never_shrinks, _("an overflow means that the scale is too large: halve it")),
        (starts_over, _("after an overflow it is halved, and does not begin from 1")),
        (swaps_the_two, _("the two numbers are the wrong way round: first the scale, then the count")),
        (halves_and_counts, _("the step with the overflow is not a clean one: the count begins at 0")),
    )
    return next((words for slip, words in slips if scales_of(slip, course) == found), "")


def _scales(outcome: Outcome) -> Finding:
    (course,) = outcome.inputs(0)
    found, wanted = outcome.values[0], scales_of(right_update, course)
    if found == wanted:
        return Finding(True)
    told = ", ".join("overflow" if one else "clean" for one in course)
    text = _("{scales} after {course}").format(scales=", ".join(f"{one:g}" for one in wanted), course=told)
    return Finding(False, text, ", ".join(f"{one:g}" for one in found), _scales_cause(course, found))


register(
    Exercise(
        id="scaler-update",
        lesson="07",
        title=_("Update the scale"),
        dots=1,
        minutes=8,
        answer="next_scale",
        hints=(
            _("Three cases: an overflow; a clean step that completes a row of `interval`; any other clean step."),
            _("After an overflow and after growing the count of clean steps begins at 0."),
        ),
        properties=(Property("scales", _("it halves after an overflow, doubles after a row of clean steps"), _scales),),
        trials=(
            Trial(_("clean steps only"), 1, course_0, scales_of, ("course",)),
            Trial(_("overflows at the start"), 1, course_1, scales_of, ("course",)),
            Trial(_("overflows in between"), 1, course_2, scales_of, ("course",)),
        ),
        wrong_answers=(
            WrongAnswer("keeps counting", keeps_counting_after_an_overflow, "scales", "begins anew"),
            WrongAnswer("grows one step late", grows_one_late, "scales", "one step late"),
            WrongAnswer("grows ever after", grows_ever_after, "scales", "in every step"),
            WrongAnswer("never shrinks", never_shrinks, "scales", "halve it"),
            WrongAnswer("starts over", starts_over, "scales", "does not begin from 1"),
            WrongAnswer("swaps the two", swaps_the_two, "scales", "first the scale"),
            WrongAnswer("counts the overflow", halves_and_counts, "scales", "not a clean one"),
        ),
    )
)  # fmt: skip
