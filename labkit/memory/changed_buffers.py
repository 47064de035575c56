"""Buffers that forward changes, such as BatchNorm's running statistics: a recomputation must not change them again.

While the function runs for the first time, each module in training that it calls is noted, with the versions of its
buffers. A recomputation works on copies of those that have changed. A norm's output in training does not depend on its
statistics; of any other module's buffers the values from before are kept, so that the recomputation starts from them.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook


class ChangedBuffers:
    """Finds the buffers that modules change inside of `noticing`, and lends them copies inside of `set_back`."""

    __slots__ = ("changed", "noted")

    def __init__(self) -> None:
        self.noted: dict[tuple[nn.Module, str], tuple[Tensor, int, Tensor | None]] = {}
        #: module, name of the buffer, its value before (None where that does not matter)
        self.changed: list[tuple[nn.Module, str, Tensor | None]] = []

    @contextlib.contextmanager
    def noticing(self, owner: object = None) -> Iterator[None]:
        """Inside, the function runs for the first time; `owner` is what it is a method of, if that is a module or has
        one as its `module`."""
        thread = threading.get_ident()
        owner = getattr(owner, "module", owner)

        def about_to_run(module: nn.Module, _: Any) -> None:
            if module._buffers and module.training and threading.get_ident() == thread:
                self._note(module)

        if isinstance(owner, nn.Module):  # its forward may be called past the hooks
            about_to_run(owner, None)
        handle = register_module_forward_pre_hook(about_to_run)
        try:
            yield
        finally:
            handle.remove()
        for (module, name), (buffer, version, before) in self.noted.items():
            # a norm's kernel changes the statistics without counting up their versions
            if before is None or module._buffers.get(name) is not buffer or buffer._version != version:
                self.changed.append((module, name, before))
        self.noted = {}

    def _note(self, module: nn.Module) -> None:
        independent = isinstance(module, _NormBase)
        for name, buffer in module._buffers.items():
            if buffer is not None and (module, name) not in self.noted:
                self.noted[module, name] = (buffer, buffer._version, None if independent else buffer.detach().clone())

    @contextlib.contextmanager
    def set_back(self) -> Iterator[None]:
        """Inside, the buffers that have changed are copies, which may be changed at will."""
        kept = []
        for module, name, before in self.changed:
            buffer = module._buffers[name]
            kept.append((module, name, buffer))
            value = buffer if before is None else before
            module._buffers[name] = None if value is None else value.detach().clone()
        try:
            yield
        finally:
            for module, name, buffer in kept:
                module._buffers[name] = buffer
