"""Letting a MemoryLedger see what ZeRO holds beside a module's own tensors: shards, buckets, gathered units."""

from typing import Any

import torch
from torch import nn

from labkit.memory import MemoryLedger
from labkit.parallel.zero.optimizer import ZeroRedundancyOptimizer
from labkit.parallel.zero.unit import Unit, whole_tensors


def watch(ledger: MemoryLedger, held: Any) -> None:
    """Have an open ledger count what `held`, a ZeroRedundancyOptimizer or a module that `fully_shard` changed, holds.

    Whole parameters of stage 3 count as "gathered", float32 copies of 16-bit parameters as "optimizer_state". With a
    budget a unit that does not fit is refused at the moment when it would be gathered.
    """
    if isinstance(held, ZeroRedundancyOptimizer):
        ledger.track("gradients", held.gradients)
        ledger.track("optimizer_state", held.masters)
        return
    units: list[Unit] = held.sharded_units

    def gathered() -> list[torch.Tensor]:
        return whole_tensors(units)

    def gradients() -> list[torch.Tensor]:
        tensors = [flat.gradients for unit in units for flat in unit.flats if flat.gradients is not None]
        return tensors + [piece.grad for piece in _pieces(units) if piece.grad is not None]

    ledger.track("gathered", gathered)
    ledger.track("gradients", gradients)

    def look() -> None:
        # a ledger that was closed counts no more
        ledger.now()

    for unit in units:
        unit.observers.append(look)


def _pieces(units: list[Unit]) -> list[nn.Parameter]:
    return [piece for unit in units for flat in unit.flats for piece in flat.pieces]
