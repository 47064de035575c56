"""Whether two tensors are the same mistake: nearness for the search of causes, far looser than equality's tolerance."""

from torch import Tensor, equal

WITHIN = 1e-3  # of the largest value


def near(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal within a thousandth of the largest value of `b`; None counts as zeros."""
    if a is None or b is None:
        return all(one is None or not one.numel() or not one.any() for one in (a, b))
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    return (a.double() - b.double()).abs().max().item() <= WITHIN * b.abs().max().item() + 1e-9


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal to the last bit, or both None."""
    return a is b or (a is not None and b is not None and equal(a, b))


def times(value: Tensor | None, factor: float) -> Tensor | None:
    """The product, None for None."""
    return None if value is None else value * factor
