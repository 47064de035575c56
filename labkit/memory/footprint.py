"""What was alive at one moment, by kind and by module."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ROOT = "(root)"  # what the outermost module itself holds, beside its submodules
OUTSIDE = "(outside)"  # what is held outside of the module: the loss, mostly


@dataclass(frozen=True)
class Footprint:
    """Bytes alive at one moment. `entries` maps (kind, module) to bytes, each storage counted once."""

    entries: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.entries.values())

    def by_kind(self) -> dict[str, int]:
        """The bytes of each kind: "parameters", "gradients", "optimizer_state", "buffers", "inputs", "activations"."""
        return self._sums(0, None)

    def by_module(self, kind: str | None = None) -> dict[str, int]:
        """The bytes of each submodule by name, of one `kind` or of all, those of its own submodules not included.

        "(root)" is what the outermost module holds itself, "(outside)" what is held outside of it, as by the loss.
        """
        return self._sums(1, kind)

    def of(self, kind: str) -> int:
        """The bytes of one kind, 0 where there is none."""
        return self.by_kind().get(kind, 0)

    def _sums(self, part: int, kind: str | None) -> dict[str, int]:
        sums: dict[str, int] = {}
        for key, count in self.entries.items():
            if count and kind in (None, key[0]):
                sums[key[part]] = sums.get(key[part], 0) + count
        return sums
