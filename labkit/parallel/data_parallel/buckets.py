"""Buckets: gradients side by side in flat tensors, so that few, large messages carry them.

Source: S. Li and others, PyTorch Distributed (VLDB 2020), section 3.2.3: buckets are filled in the reverse order of
the parameters, since backward reaches the last ones first; the first bucket is small, so that sending starts early.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

FIRST_BUCKET_BYTES = 1 << 20


def assign(parameters: Sequence[nn.Parameter], *, cap_bytes: int, first_cap_bytes: int) -> list[list[int]]:
    """Places in `parameters`, which are in the order of readiness, for each bucket.

    A bucket is closed when it has reached its cap, and holds one dtype on one device. Buckets are in the order in
    which their first parameter is ready.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    done: list[list[int]] = []
    caps = {False: first_cap_bytes, True: cap_bytes}
    for index, parameter in enumerate(parameters):
        key = parameter.dtype, parameter.device
        open_buckets.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + parameter.numel() * parameter.element_size()
        if filled[key] >= caps[bool(done)]:
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
        self.views = [
            part.view_as(parameter) for part, parameter in zip(self.flat.split(lengths), self.parameters, strict=True)
        ]
        self.waiting = len(self.parameters)  # gradients not ready yet

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def take(self, index: int, divisor: int) -> None:
        """Divide a ready gradient and bring it to its place; from here on it lives there."""
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        else:
            # division comes before the sum, which then can't overflow where the average would not
            torch.div(gradient.detach(), divisor, out=view)
