"""The states of random generators: what a recomputation must set back to draw the same masks again."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

States = list[tuple[torch.Generator, torch.Tensor]]


class RandomStates:
    """The states of the CPU's generator, of those of `devices`, and of `others`, as they are now.

    Those of Python's `random` and of NumPy are not among them, as in PyTorch.
    """

    def __init__(self, devices: Iterable[torch.device] = (), others: Iterable[torch.Generator] = ()) -> None:
        self.states = _states([torch.default_generator, *_of(devices), *others])

    def keep_those_that_changed(self) -> None:
        """Forget the generators from which nothing was drawn since: a recomputation draws nothing from them either."""
        self.states = [
            (generator, state) for generator, state in self.states if not torch.equal(state, generator.get_state())
        ]

    def put_back(self) -> None:
        """Set the generators to the states of then, for good."""
        _set(self.states)

    @contextlib.contextmanager
    def set_back(self) -> Iterator[None]:
        """Inside, the generators are in the states of then; after it, in those of now."""
        now = _states(generator for generator, _ in self.states)
        _set(self.states)
        try:
            yield
        finally:
            _set(now)


def _states(generators: Iterable[torch.Generator]) -> States:
    return [(generator, generator.get_state()) for generator in generators]


def _set(states: States) -> None:
    for generator, state in states:
        generator.set_state(state)


def _of(devices: Iterable[torch.device]) -> Iterator[torch.Generator]:
    """The default generator of each device but the CPU."""
    for device in devices:
        if device.type not in ("cpu", "meta"):
            backend = torch.get_device_module(device.type)
            yield backend.default_generators[backend.current_device() if device.index is None else device.index]
