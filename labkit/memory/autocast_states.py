"""Which autocast is on: what a recomputation, which mostly runs outside of it, must enter again."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

from labkit.precision import autocast_state


class AutocastStates:
    """labkit's autocast, and torch's for the CPU and the types of `devices`, as they are now."""

    __slots__ = ("cached", "ours", "types")

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        types = {"cpu", *(device.type for device in devices if device.type != "meta")}
        self.types = [(one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in types]
        self.cached = torch.is_autocast_cache_enabled()
        self.ours = autocast_state()

    def same_now(self) -> bool:
        """Whether torch's is still as it was."""
        return self.cached == torch.is_autocast_cache_enabled() and all(
            on == torch.is_autocast_enabled(one) and dtype == torch.get_autocast_dtype(one)
            for one, on, dtype in self.types
        )

    @contextlib.contextmanager
    def set_back(self) -> Iterator[None]:
        """Inside, autocast is as it was then."""
        with contextlib.ExitStack() as regions:
            if self.ours != autocast_state():
                regions.enter_context(self.ours.restore())
            if not self.same_now():
                for one, on, dtype in self.types:
                    regions.enter_context(torch.autocast(one, dtype=dtype, enabled=on, cache_enabled=self.cached))
            yield
