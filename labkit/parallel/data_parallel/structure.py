"""What must stay as it was when a module was wrapped: its modules, its parameters, and which of them are trained."""

import torch
from torch import nn


class Structure:
    """Remembers a module's parameters and submodules by identity; `check` is cheap enough for every forward."""

    def __init__(self, module: nn.Module) -> None:
        self._stores = [
            (prefix, kind, store, list(store.items()))
            for prefix, owner in module.named_modules()
            for kind, store in (("parameter", owner._parameters), ("module", owner._modules))
        ]
        self._buffers = [owner._buffers for owner in module.modules()]
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}

    def check(self, *, may_freeze: bool) -> bool:
        """Raise RuntimeError where something was replaced, added, removed, frozen or unfrozen.

        Returns whether there is something to average: with all parameters frozen for a while, as where two networks are
        trained in turns, there is not. `may_freeze` allows to freeze some of them.
        """
        for prefix, kind, store, items in self._stores:
            if len(store) != len(items) or any(store.get(name) is not value for name, value in items):
                self._refuse_change(prefix, kind, store, items)
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"DistributedDataParallel: parameter {name} was frozen when the module was wrapped and is trained "
                    "now, so its gradient would not be averaged: set requires_grad first, then wrap"
                )
        frozen = [name for name, parameter in self._trained.items() if not parameter.requires_grad]
        if frozen and len(frozen) < len(self._trained) and not may_freeze:
            raise RuntimeError(
                f"DistributedDataParallel: parameter {frozen[0]} was frozen after wrapping, and its bucket would wait "
                "for it: freeze first, then wrap, or pass find_unused_parameters=True"
            )
        return len(frozen) < len(self._trained)

    def buffers(self) -> list[torch.Tensor]:
        """The buffers that the module has now, each once."""
        found = (buffer for store in self._buffers for buffer in store.values() if buffer is not None)
        return list({id(buffer): buffer for buffer in found}.values())

    @staticmethod
    def _refuse_change(prefix: str, kind: str, store: dict[str, object], items: list[tuple[str, object]]) -> None:
        before, changed = dict(items), "replaced"
        name = next((name for name, value in before.items() if store.get(name) is not value), "")
        if name and name not in store:
            changed = "removed"
        elif not name:
            name, changed = next(name for name in store if name not in before), "added"
        full = f"{prefix}.{name}" if prefix else name
        raise RuntimeError(
            f"DistributedDataParallel: {kind} {full} was {changed} after wrapping, so gradients would not be averaged "
            "rightly: change the module first, then wrap it"
        )
