"""What a function's result depends on besides its arguments: random states, autocast, buffers, the default device."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.memory.autocast_states import AutocastStates
from labkit.memory.changed_buffers import ChangedBuffers
from labkit.memory.random_states import RandomStates


class Surroundings:
    """The surroundings of a first run with these arguments, for as many recomputations as are needed.

    with surroundings.of_first_run(function): function(...)
    with surroundings.set_back(): function(...)  # as the first time, and without a trace
    """

    __slots__ = ("autocast", "buffers", "device", "random")

    def __init__(self, arguments: Sequence[Any], *, preserve_rng_state: bool = True) -> None:
        devices = {argument.device for argument in arguments if isinstance(argument, Tensor)}
        generators = [argument for argument in arguments if isinstance(argument, torch.Generator)]
        self.random = RandomStates(devices, generators) if preserve_rng_state else None
        self.autocast = AutocastStates(devices)
        self.buffers = ChangedBuffers()
        self.device = torch.get_default_device()

    @contextlib.contextmanager
    def of_first_run(self, function: Callable[..., Any]) -> Iterator[None]:
        """The function runs inside for the first time."""
        with self.buffers.noticing(getattr(function, "__self__", None)):
            yield
        if self.random is not None:
            self.random.keep_those_that_changed()

    @contextlib.contextmanager
    def set_back(self) -> Iterator[None]:
        """The function runs inside once more."""
        with contextlib.ExitStack() as back:
            if self.random is not None and self.random.states:
                back.enter_context(self.random.set_back())
            if self.buffers.changed:
                back.enter_context(self.buffers.set_back())
            back.enter_context(self.autocast.set_back())
            if self.device != torch.get_default_device():
                back.enter_context(self.device)
            yield
