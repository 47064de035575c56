"""The book that a ledger keeps: which storages are alive, of what kind, in whose hands, and the most there ever was.

A storage that is held for backward counts as long as something that autograd packed refers to it. Any other (a
parameter, a gradient) counts until the storage itself dies. Weak references tell; nothing here keeps a tensor alive.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from labkit.memory.footprint import OUTSIDE, Footprint
from labkit.memory.storages import storages
from labkit.record import add_memory, recorders
from labkit.words import _

ACTIVATIONS = "activations"


class MemoryBudgetError(RuntimeError):
    """What was asked for does not fit into the ledger's budget; the message says what, and what is there already."""


class Entry:
    """One storage: `saves` counts what autograd has packed of it; one that is `lasting` counts until it dies."""

    __slots__ = ("bytes", "key", "kind", "lasting", "module", "saves", "watch")

    def __init__(self, key: int, kind: str, module: str) -> None:
        self.key, self.kind, self.module = key, kind, module
        self.bytes = self.saves = 0
        self.lasting = False
        self.watch: Any = None


class Account:
    """Counts storages. `own`, `save` and `linger` add; what goes is noticed. A change is told to open recorders."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.open = True
        self.total = 0
        self.entries: dict[int, Entry] = {}  # by the address of the storage, which is no one else's while it lives
        self.sums: dict[tuple[str, str], int] = {}
        self.kinds: dict[str, int] = {}
        self.peak = Footprint()
        self._peak_total = 0
        self._listeners: list[int] = []
        self._references: dict[int, Any] = {}
        # a storage may end at any moment, in the middle of a change too: then it waits in this queue
        self._gone: deque[tuple[Entry, bool]] = deque()
        self._lock = threading.Lock()

    # --- what comes ---

    def own(self, kind: str, module: str, held: Any) -> None:
        """Count what `held` holds as `kind` until it dies; what is owned already keeps its kind."""
        with self._change():
            for storage in storages(held):
                entry = self._entry(storage, kind, module)
                if entry.kind == ACTIVATIONS != kind:
                    self._count(entry, 0)
                    entry.kind, entry.module = kind, module
                self._watch(entry, storage)
                self._count(entry, storage.nbytes())

    def save(self, module: str, held: Any) -> tuple[Entry, ...]:
        """Count what `held` holds as activations until `release` is called with what this returns."""
        saved = []
        with self._change():
            for storage in storages(held):
                entry = self._entry(storage, ACTIVATIONS, module)
                self._count(entry, storage.nbytes())
                entry.saves += 1
                saved.append(entry)
        return tuple(saved)

    def linger(self, module: str, held: Any) -> None:
        """Count the tensors in `held` as activations until these very tensors die, whoever holds them."""
        account = weakref.ref(self)
        for tensor in tree_leaves(held):
            if isinstance(tensor, Tensor):
                saved = self.save(module, tensor)

                def died(reference: Any, saved: tuple[Entry, ...] = saved) -> None:
                    here = account()
                    if here is not None:
                        here._references.pop(id(reference), None)
                        here.release(saved)

                reference = weakref.ref(tensor, died)
                self._references[id(reference)] = reference

    # --- what goes ---

    def release(self, saved: tuple[Entry, ...]) -> None:
        """One thing less for which autograd holds these."""
        if self.open:
            self._gone.extend((entry, False) for entry in saved)
            self._settle()

    def close(self) -> None:
        """Count no more. The peak, and what was alive last, stay."""
        with self._change():
            self._keep_peak()
        self.open = False
        self.entries, self._references = {}, {}

    # --- what there is ---

    def now(self) -> Footprint:
        """What is alive."""
        with self._change():
            return Footprint({key: count for key, count in self.sums.items() if count})

    def highest(self) -> Footprint:
        """What was alive when there was most."""
        with self._change():
            self._keep_peak()
            return self.peak

    def forget_peak(self) -> None:
        """Look for the peak anew, from what is alive now."""
        with self._change():
            self.peak, self._peak_total = Footprint(), 0

    # --- inside ---

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._lock:
            self._bury()
            yield
        self._settle()

    def _settle(self) -> None:
        """Take note of what has gone, unless a change is going on, which does so at its end."""
        while self._gone and self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._gone:
            entry, died = self._gone.popleft()
            if died:
                entry.lasting = False
            else:
                entry.saves -= 1
            if not entry.lasting and entry.saves <= 0 and self.entries.get(entry.key) is entry:
                self._count(entry, 0)
                del self.entries[entry.key]

    def _entry(self, storage: Any, kind: str, module: str) -> Entry:
        key = storage._cdata
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(key, kind, module)
        return entry

    def _watch(self, entry: Entry, storage: Any) -> None:
        if entry.lasting:
            return
        entry.lasting = True
        account = weakref.ref(self)

        def died(_reference: Any) -> None:
            here = account()
            if here is not None and here.open:
                here._gone.append((entry, True))
                here._settle()

        entry.watch = weakref.ref(storage, died)

    def _count(self, entry: Entry, nbytes: int) -> None:
        """The entry has so many bytes now."""
        growth = nbytes - entry.bytes
        if not growth or not self.open:
            return
        if growth > 0 and self.budget_bytes is not None and self.total + growth > self.budget_bytes:
            if not (entry.lasting or entry.saves):
                del self.entries[entry.key]
            raise MemoryBudgetError(self._refusal(entry, growth, self.budget_bytes))
        if growth < 0:
            self._keep_peak()
        self.total += growth
        entry.bytes = nbytes
        key = (entry.kind, entry.module)
        self.sums[key] = self.sums.get(key, 0) + growth
        self.kinds[entry.kind] = self.kinds.get(entry.kind, 0) + growth
        self._tell(entry.kind)

    def _keep_peak(self) -> None:
        # a copy of all sums at each new height would be slow; just before the first descent is soon enough
        if self.total > self._peak_total:
            self._peak_total = self.total
            self.peak = Footprint({key: count for key, count in self.sums.items() if count})

    def _tell(self, kind: str) -> None:
        listeners = [id(recorder) for recorder in recorders()]
        if listeners and listeners == self._listeners:
            add_memory(kind, self.kinds[kind])
        elif listeners:  # someone has not heard yet what was there before
            for each, nbytes in self.kinds.items():
                add_memory(each, nbytes)
        self._listeners = listeners

    def _refusal(self, entry: Entry, growth: int, budget: int) -> str:
        there = ", ".join(f"{kind.replace('_', ' ')} {_size(count)}" for kind, count in self.kinds.items() if count)
        where = _("outside of the module") if entry.module == OUTSIDE else _("in {module}").format(module=entry.module)
        text = _(
            "{size} of {kind} {where} don't fit: {total} are alive ({there}), and the budget is {budget}; make the "
            "batch or the model smaller, or hold less for backward."
        )
        return text.format(
            size=_size(growth),
            kind=entry.kind.replace("_", " "),
            where=where,
            total=_size(self.total),
            there=there or _("nothing"),
            budget=_size(budget),
        )


def _size(nbytes: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} B"
