"""Lesson 07: clipping beside loss scaling, and why a scaled gradient must not be clipped."""

from collections.abc import Callable
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

SCALE = 1024.0


def _gradients(length: float) -> list[Any]:
    """Two gradients, together of this length, times the scale."""
    import torch

    generator = torch.Generator().manual_seed(7)
    parts = [torch.randn(shape, generator=generator) for shape in ((3, 2), (4,))]
    whole = torch.cat([part.flatten() for part in parts]).norm()
    return [part * (length * SCALE / whole) for part in parts]


def long_gradients(rank: int, world_size: int) -> tuple[Any, ...]:
    return _gradients(10.0), SCALE, 1.0


def short_gradients(rank: int, world_size: int) -> tuple[Any, ...]:
    return _gradients(0.5), SCALE, 1.0


def other_limit(rank: int, world_size: int) -> tuple[Any, ...]:
    return _gradients(100.0), SCALE, 5.0


def prepared(function: Callable[..., Any], gradients: list[Any], scale: float, max_norm: float) -> Any:
    """All gradients as one vector, as the answer leaves them for the optimizer."""
    import torch

    gradients = [gradient.clone() for gradient in gradients]
    answer = function(gradients, scale, max_norm)
    tensors = isinstance(answer, tuple | list) and all(isinstance(one, torch.Tensor) for one in answer)
    if answer is not None and not tensors:
        raise Nonsense(describe(answer), _("nothing: change the gradients in place; or a list of gradients"))
    return torch.cat([one.flatten() for one in (gradients if answer is None else answer)])


def _clip(gradients: list[Any], max_norm: float) -> None:
    import torch

    norm = torch.cat([one.flatten() for one in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm.item() + 1e-6)))


def _unscale(gradients: list[Any], scale: float) -> None:
    for gradient in gradients:
        gradient.div_(scale)


def right(gradients: list[Any], scale: float, max_norm: float) -> None:
    _unscale(gradients, scale)
    _clip(gradients, max_norm)


def clips_first(gradients: list[Any], scale: float, max_norm: float) -> None:
    _clip(gradients, max_norm)
    _unscale(gradients, scale)


def leaves_the_scale(gradients: list[Any], scale: float, max_norm: float) -> None:
    _clip(gradients, max_norm)


def never_clips(gradients: list[Any], scale: float, max_norm: float) -> None:
    _unscale(gradients, scale)


def unscales_twice(gradients: list[Any], scale: float, max_norm: float) -> None:
    _unscale(gradients, scale * scale)
    _clip(gradients, max_norm)


def clips_each_by_itself(gradients: list[Any], scale: float, max_norm: float) -> None:
    _unscale(gradients, scale)
    for gradient in gradients:
        _clip([gradient], max_norm)


def multiplies(gradients: list[Any], scale: float, max_norm: float) -> None:
    _unscale(gradients, 1 / scale)
    _clip(gradients, max_norm)


def clamps_each_number(gradients: list[Any], scale: float, max_norm: float) -> None:
    _unscale(gradients, scale)
    for gradient in gradients:
        gradient.clamp_(-max_norm, max_norm)


def always_stretches(gradients: list[Any], scale: float, max_norm: float) -> None:
    import torch

    norm = torch.cat([one.flatten() for one in gradients]).norm().item()
    for gradient in gradients:
        gradient.mul_(max_norm / norm)


def makes_new_ones(gradients: list[Any], scale: float, max_norm: float) -> None:
    gradients = [gradient / scale for gradient in gradients]
    _clip(gradients, max_norm)


def _cause(inputs: tuple[Any, ...], found: Any) -> str:
    import torch

    slips: tuple[tuple[Callable[..., Any], str], ...] = (
        (clips_first, _("clipped while still scaled: nearly every gradient looks too long then, and after the division "
                        "it is shorter than the limit by the scale")),
        (leaves_the_scale, _("a gradient within the limit is as long as the limit: never divided by the scale, or "
                             "stretched where it should be left alone")),
        (never_clips, _("nothing is clipped")),
        (clamps_each_number, _("each number is cut off by itself, which turns the gradient; its length is limited")),
        (makes_new_ones, _("they are as they came: change the tensors themselves (div_, mul_), "
                           "or return the new ones")),
        (unscales_twice, _("divided by the scale twice")),
        (clips_each_by_itself, _("each gradient is clipped by itself: the limit is for all of them together")),
    )  # fmt: skip
    for slip, words in slips:
        if torch.allclose(found, prepared(slip, *inputs), rtol=1e-3, atol=1e-9):
            return words
    return ""


def _right_gradients(outcome: Outcome) -> Finding:
    import torch

    inputs, found = outcome.inputs(0), outcome.values[0]
    wanted = prepared(right, *inputs)
    if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=1e-9):
        return Finding(True)
    told, shown = (_("gradients of length {length:.4g}").format(length=one.norm().item()) for one in (wanted, found))
    cause = _cause(inputs, found) if found.shape == wanted.shape else _("a gradient is lost or added")
    return Finding(False, told, shown, cause)


register(
    Exercise(
        id="clip-scaled",
        lesson="07",
        title=_("Clip beside a scaler"),
        dots=2,
        minutes=8,
        answer="prepare_gradients",
        hints=(
            _("Which length does `max_norm` speak of: that of the gradient, or that of the gradient times the scale?"),
            _("First divide every gradient by the scale. Then take one norm over all of them, and multiply all by "
              "`max_norm / norm` where that is below 1."),
        ),
        properties=(
            Property("gradients", _("what the optimizer gets is the true gradient, clipped"), _right_gradients),
        ),
        trials=(
            Trial(_("gradients too long"), 1, long_gradients, prepared, ("gradients", "scale", "max_norm")),
            Trial(_("gradients within the limit"), 1, short_gradients, prepared, ("gradients", "scale", "max_norm")),
            Trial(_("another limit"), 1, other_limit, prepared, ("gradients", "scale", "max_norm")),
        ),
        wrong_answers=(
            WrongAnswer("clips first", clips_first, "gradients", "while still scaled"),
            WrongAnswer("leaves the scale", leaves_the_scale, "gradients", "never divided"),
            WrongAnswer("never clips", never_clips, "gradients", "nothing is clipped"),
            WrongAnswer("unscales twice", unscales_twice, "gradients", "twice"),
            WrongAnswer("clips each by itself", clips_each_by_itself, "gradients", "by itself"),
            WrongAnswer("multiplies by the scale", multiplies, "gradients", "never divided"),
            WrongAnswer("clamps each number", clamps_each_number, "gradients", "cut off by itself"),
            WrongAnswer("makes new ones", makes_new_ones, "gradients", "as they came"),
            WrongAnswer("always stretches", always_stretches, "gradients", "stretched"),
        ),
    )
)  # fmt: skip
