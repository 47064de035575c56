"""Buckets of ZeRO stages 1 and 2: parameters side by side, their gradients likewise, and this rank's part of both.

A bucket's gradients are reduced in one message as soon as the last one is ready, and its parameters gathered in one
after the step. What happens to the gradients when they are reduced is what tells the stages apart.
"""

from collections.abc import Iterable

import torch
from torch import nn

from labkit.collectives.groups import Endpoint
from labkit.parallel.data_parallel.buckets import SMALL_BYTES, bring_in
from labkit.parallel.zero.layout import FlatLayout


class ShardedBucket:
    """Some parameters of one dtype and device, which from here on live in one flat tensor, `values`.

    Attributes:
        in_flight: how many reductions may be under way at a time.
        flat: the gradients of all, of the same layout, while it is needed.
        reduced: this rank's part of the averaged gradients, None where there are none.
        used: for each parameter, whether a backward has given it a gradient.
    """

    in_flight = 1

    def __init__(self, parameters: Iterable[nn.Parameter], end: Endpoint) -> None:
        self.parameters, self.place = list(parameters), end.place
        self.layout = FlatLayout.of(self.parameters, end.size)
        first = self.parameters[0]
        self.values = torch.empty(self.layout.length, dtype=first.dtype, device=first.device)
        self.layout.fill(self.values, self.parameters)
        for parameter, view in zip(self.parameters, self.layout.views(self.values), strict=True):
            parameter.data = view
        self.addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.is_small = [parameter.numel() * parameter.element_size() < SMALL_BYTES for parameter in self.parameters]
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.reduced: torch.Tensor | None = None
        self.forget()
        self.used = [False] * len(self.parameters)

    @property
    def part(self) -> torch.Tensor:
        """This rank's part of the values."""
        return self.layout.part(self.values, self.place)

    def forget(self) -> None:
        """Await all gradients anew."""
        self.waiting = len(self.parameters)
        self._small: list[int] = []  # ready, and not brought to their places yet

    # --- a gradient is ready ---

    def open(self) -> None:
        """Make room for the gradients."""
        if self.flat is None:
            self.flat = torch.empty_like(self.values)
            self.layout.clear_padding(self.flat)
            self.views = self.layout.views(self.flat)

    def keep(self, index: int) -> None:
        """Keep a gradient that is only accumulated: later backwards add to it in its place."""
        self.open()
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view

    def take(self, index: int, divisor: int) -> None:
        """Bring a gradient to its place, divided: before the sum, which then can't overflow where the mean would not.
        A small one when `close` is called. The parameter's own `.grad` is None from here on."""
        self.open()
        self.waiting -= 1
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            return
        self.used[index] = True
        if self.is_small[index]:
            self._small.append(index)
        else:
            torch.div(gradient.detach(), divisor, out=view)
            parameter.grad = None

    def close(self, divisor: int) -> None:
        """All are here: bring the small ones to their places."""
        if not self._small or self.flat is None:
            return
        views = [self.views[index] for index in self._small]
        bring_in(self.parameters, self._small, views, divisor, whole=self.flat)
        for index in self._small:
            self.parameters[index].grad = None

    # --- reduced ---

    def output(self) -> torch.Tensor:
        """Where this rank's part of the averaged gradients is to arrive."""
        return torch.empty_like(self.part)

    def settle(self, output: torch.Tensor) -> None:
        """Take this rank's part of the averaged gradients."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget the gradients."""
        self.reduced = None
        self.used = [False] * len(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None

    def gradient(self, index: int) -> torch.Tensor | None:
        """This rank's piece of a parameter's averaged gradient, flat; None if it has none."""
        if self.reduced is None or not self.used[index]:
            return None
        piece = self.layout.piece(index, self.place)
        return self.reduced[piece.at : piece.at + piece.numel]
