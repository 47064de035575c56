"""Refusing an answer that is not of the type or shape that was asked for, in words that name what came instead."""

from typing import Any


class Nonsense(TypeError):
    """The learner's function returned something else than was asked for: what came, and what was wanted."""

    def __init__(self, returned: str, wanted: str) -> None:
        super().__init__(returned, wanted)
        self.returned, self.wanted = returned, wanted


def describe(value: Any) -> str:
    """A value in a few words: its type, and its shape, length or content where that is short."""
    if value is None:
        return "None (is there a return?)"
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{article} {kind} of shape {tuple(shape)} and type {getattr(value, 'dtype', '?')}"
    try:
        shown = repr(value)
    except Exception:
        return f"{article} {kind} that can't be printed"
    return f"{article} {kind}, {shown if len(shown) <= 60 else shown[:59] + '…'}"


def expect_tensor(value: Any, like: Any) -> Any:
    """`value`, if it is a tensor of the shape and type of the tensor `like`; else raises Nonsense."""
    import torch

    wanted = f"a tensor of shape {tuple(like.shape)} and type {like.dtype}"
    if not isinstance(value, torch.Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        raise Nonsense(describe(value), wanted)
    return value.detach()
