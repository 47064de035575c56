"""Deferred initialisation: a unit's parameters get memory and values when it is sharded, one unit after the other.

So a model that is larger than one rank's memory, built on the meta device, never exists whole anywhere.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from labkit.parallel.zero.flat_parameters import Slot


def materialise(
    module: nn.Module,
    own: Iterable[nn.Module],
    slots: Sequence[Slot],
    initialise: Callable[[nn.Module], None] | None,
) -> None:
    """Give the parameters in `slots`, and the buffers of the modules `own`, memory and values where they have none."""
    if not any(slot.original.is_meta for slot in slots):
        return
    owners: list[nn.Module] = []
    for one in own:
        for name, buffer in one._buffers.items():
            if buffer is not None and buffer.is_meta:
                one._buffers[name] = torch.empty_like(buffer, device="cpu")
                owners.append(one)
    for slot in slots:
        if slot.original.is_meta:
            empty = torch.empty_like(slot.original, device="cpu")
            slot.original = nn.Parameter(empty, requires_grad=slot.original.requires_grad)
            for owner, name in slot.owners:
                owner._parameters[name] = slot.original
            resettable = [owner for owner, _ in slot.owners if hasattr(owner, "reset_parameters")]
            if initialise is None and not resettable:
                kind = type(slot.owners[0][0]).__name__
                raise ValueError(
                    f"fully_shard: {slot.name} is on the meta device, and {kind} has no reset_parameters to give it "
                    "values: pass initialise=, a function that sets the parameters of the module"
                )
            owners += resettable[:1]
    if initialise is not None:
        initialise(module)
        return
    for owner in {id(one): one for one in owners}.values():
        owner.reset_parameters()  # type: ignore[operator]
