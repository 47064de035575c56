"""A number as its bits: sign, exponent and mantissa side by side, and what they make."""

import math

import torch
from matplotlib.patches import Rectangle

from labkit.precision import FORMATS, Format, decode
from labkit.show import theme
from labkit.show.canvas import new_figure
from labkit.show.picture import Picture, drawing
from labkit.words import _

_FIELDS = ("communication", "backward", "forward")  # colours of sign, exponent and mantissa


def number_bits(pattern: int, form: Format, *, title: str | None = None, alt: str | None = None) -> Picture:
    """The pattern's bits in boxes, the highest on the left, and under them how the number follows from the fields.

    `pattern` is a whole number from 0 to 2^bits - 1, else a ValueError.
    """
    if not 0 <= pattern < 1 << form.bits:
        raise ValueError(f"a pattern of {form.name} is a whole number from 0 to 2^{form.bits} - 1, not {pattern}")
    value = decode(torch.tensor([pattern]), form).item()
    bits = f"{pattern:0{form.bits}b}"
    shown = title or _("{form}: these bits are {value}").format(form=form.name, value=written(value))
    widths = (1, form.exponent_bits, form.mantissa_bits)
    names = (_("sign"), _("exponent"), _("mantissa"))
    with drawing():
        figure, (axes,) = new_figure(shown, 1.35)
        axes.set_axis_off()
        left, rest = 0.0, bits
        for kind, name, width in zip(_FIELDS, names, widths, strict=True):
            field, rest = rest[:width], rest[width:]
            for index, bit in enumerate(field):
                face = theme.color_of(kind) if bit == "1" else "none"
                axes.add_patch(
                    Rectangle(
                        (left + index + 0.06, 0), 0.88, 1, facecolor=face, edgecolor=theme.color_of(kind), linewidth=1.2
                    )
                )
                color = theme.label_color_of(kind) if bit == "1" else theme.INK.light
                axes.text(left + index + 0.5, 0.5, bit, ha="center", va="center_baseline", color=color)
            middle = left + width / 2
            axes.text(middle, 1.25, name, ha="center", va="bottom", fontsize=theme.SMALL, color=theme.INK.light)
            left += width + 0.35
        axes.text(0, -0.55, arithmetic(pattern, form), va="center", color=theme.INK.light)
        axes.set_xlim(0, max(left, 17.0))
        axes.set_ylim(-1.0, 1.9)
    text = _("Bits {bits}, from the sign down: {how}.").format(bits=bits, how=arithmetic(pattern, form))
    return Picture(figure, shown, alt or text)


def arithmetic(pattern: int, form: Format) -> str:
    """How the number follows from the fields, in one line."""
    mantissa = pattern & ((1 << form.mantissa_bits) - 1)
    field = pattern >> form.mantissa_bits & ((1 << form.exponent_bits) - 1)
    value = decode(torch.tensor([pattern]), form).item()
    sign = "−" if pattern >> (form.bits - 1) else "+"
    if math.isnan(value):
        return _("not a number (NaN)")
    if math.isinf(value):
        return _("{sign} infinity: the exponent is kept for it").format(sign=sign)
    if not field:
        text = _("{sign} 2^{power} × (0 + {mantissa}/{whole}), a subnormal number: {value}")
    else:
        text = _("{sign} 2^({field} − {bias}) × (1 + {mantissa}/{whole}) = {value}")
    return text.format(
        sign=sign,
        field=field,
        bias=form.bias,
        power=form.smallest_exponent,
        mantissa=mantissa,
        whole=1 << form.mantissa_bits,
        value=written(value),
    )


def written(value: float) -> str:
    """A number as people write it, to eight digits."""
    return f"{value:.8g}"


def landmarks(form: Format) -> dict[str, int]:
    """Patterns worth looking at, by what they are."""
    one = form.bias << form.mantissa_bits
    top = (1 << (form.bits - 1)) - 1
    beyond = top - (1 << form.mantissa_bits) + 1 if form.infinities else top
    return {
        _("one"): one,
        _("the next after one"): one + 1,
        _("the largest"): beyond - 1,
        _("the smallest subnormal"): 1,
    }


def format_named(name: str) -> Format:
    """The format of that name; a ValueError lists them."""
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]
