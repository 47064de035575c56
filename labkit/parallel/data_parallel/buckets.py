"""Buckets: gradients side by side in flat tensors, so that few, large messages carry them.

Source: S. Li and others, PyTorch Distributed (VLDB 2020), section 3.2.3: buckets are filled in the reverse order of
the parameters, since backward reaches the last ones first; the first bucket is small, so that sending starts early.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

FIRST_BUCKET_BYTES = 1 << 20
#: gradients below this are divided and copied together when the bucket is full: by then each is but a call's price
SMALL_BYTES = 1 << 14


def assign(parameters: Sequence[nn.Parameter], *, cap_bytes: float, first_cap_bytes: float) -> list[list[int]]:
    """Places in `parameters`, which are in the order of readiness, for each bucket.

    A bucket is closed when it has reached its cap, and holds one dtype on one device. Buckets are in the order in
    which their first parameter is ready.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    done: list[list[int]] = []
    for index, parameter in enumerate(parameters):
        key = parameter.dtype, parameter.device
        open_buckets.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + parameter.numel() * parameter.element_size()
        if filled[key] >= (cap_bytes if done else first_cap_bytes):
            done.append(open_buckets.pop(key))
            filled[key] = 0
    return sorted(done + list(open_buckets.values()), key=lambda indices: indices[0])


class Bucket:
    """Some parameters and the flat tensor that holds their gradients. `views[i]` is the place of parameter i's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        lengths = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.zeros(sum(lengths), dtype=first.dtype, device=first.device)
        parts = self.flat.split(lengths)
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]
        self.is_small = [view.numel() * view.element_size() < SMALL_BYTES for view in self.views]
        self.forget()

    def forget(self) -> None:
        """Await all gradients anew."""
        self.waiting = len(self.parameters)
        self._small: list[int] = []  # taken, and not brought to their places yet

    def take(self, index: int, divisor: int) -> None:
        """A gradient is ready: divide it and bring it to its place, where it lives from here on. A small one when
        `close` is called. Division comes before the sum, which then can't overflow where the average would not."""
        self.waiting -= 1
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif self.is_small[index]:
            self._small.append(index)
        else:
            torch.div(gradient.detach(), divisor, out=view)
            parameter.grad = view

    def close(self, divisor: int) -> None:
        """All are here: bring the small ones to their places."""
        if not self._small:
            return
        views = [self.views[index] for index in self._small]
        bring_in(self.parameters, self._small, views, divisor, whole=self.flat)
        for index, view in zip(self._small, views, strict=True):
            self.parameters[index].grad = view


def bring_in(
    parameters: Sequence[nn.Parameter],
    indices: Sequence[int],
    views: list[torch.Tensor],
    divisor: int,
    *,
    whole: torch.Tensor,
) -> None:
    """Copy the gradients of the parameters with these indices to their places, `views` of the flat tensor `whole`, and
    divide them: two calls for all. None of the gradients is None; what is in its place already stays there."""
    gradients = [parameters[index].grad for index in indices]
    with torch.no_grad():
        torch._foreach_copy_(views, gradients)  # type: ignore[arg-type]
        if len(views) == len(parameters):
            whole.div_(divisor)
        else:
            torch._foreach_div_(views, float(divisor))
