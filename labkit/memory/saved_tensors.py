"""Seeing what autograd saves for backward, by its own hooks, and when it lets go.

Source: torch.autograd.graph.saved_tensors_hooks in the documentation of PyTorch. Of several pairs of hooks autograd
calls the innermost only, and torch.utils.checkpoint has a pair of its own; so while a ledger is open, pairs that are
entered inside are watched: what they pack is counted too, as long as it lives.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from labkit.memory.accounts import Account, Entry

#: What an open ledger gives: its account, and which module runs while a tensor is saved.
Watcher = tuple[Account, Callable[[Tensor], str]]

_watchers: list[Watcher] = []
_enter = saved_tensors_hooks.__enter__


class Held:
    """A tensor that autograd holds for backward, in place of the tensor; its end is the end of the holding."""

    __slots__ = ("saved", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself may refer to the node that saves it: a cycle
        self.version = tensor._version
        self.saved: list[tuple[Account, tuple[Entry, ...]]] = []
        for account, who in _watchers:
            self.saved.append((account, account.save(who(tensor), tensor)))

    def __del__(self) -> None:
        for account, entries in getattr(self, "saved", ()):
            account.release(entries)

    def unpack(self) -> Tensor:
        # Where there are hooks autograd leaves this check out, and the gradient would be wrong without a word.
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"A tensor of shape {list(self.tensor.shape)} that is needed for backward was changed by an operation "
                "in place (with _ at its end, or +=) after it was used: change a copy of it instead."
            )
        return self.tensor


class Watched:
    """The pack hook of someone else, watched: the tensors that it gives to autograd are counted until they die."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        self._pack = pack

    def __call__(self, tensor: Tensor) -> Any:
        packed: Any = tensor  # checkpointing keeps the last one by itself and raises, to end its recomputation
        try:
            packed = self._pack(tensor)
        finally:
            for account, who in _watchers:
                account.linger(who(tensor), packed)
        return packed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pack, name)  # checkpointing marks its own hooks, and looks for the marks


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of all that autograd saves in this thread, and what hooks entered meanwhile pack in any."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    _watchers.append(watcher)
    saved_tensors_hooks.__enter__ = _enter_watched  # type: ignore[method-assign]
    try:
        pack: Any = Held
        unpack: Any = Held.unpack
        if outer is not None and outer[0] is not Held:  # hooks that were there before go on doing what they do
            pack, unpack = outer[0] if isinstance(outer[0], Watched) else Watched(outer[0]), outer[1]
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        try:
            yield
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
    finally:
        _watchers.remove(watcher)
        if not _watchers:
            saved_tensors_hooks.__enter__ = _enter  # type: ignore[method-assign]


def _enter_watched(hooks: saved_tensors_hooks) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(Watched(hooks.pack_hook), hooks.unpack_hook)
