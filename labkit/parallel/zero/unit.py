"""A unit of stage 3: the parameters that are gathered together, just before a module computes, and freed after.

Source: S. Rajbhandari and others, ZeRO (SC20), arXiv:1910.02054, sections 5.3 and 7.2.2: parameters are gathered in
forward and once more in backward, gradients are reduced to their shards: 3 P (N - 1) / N elements a rank and step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from labkit.collectives import ReduceOp, Work
from labkit.parallel.zero.flat_parameters import FlatParameters, Held
from labkit.record import add_memory, recording

#: reductions that may be under way while the next unit computes
IN_FLIGHT = 1


class Unit:
    """The parameters of a module that belong to no unit inside of it.

    Attributes:
        reshard: whether they are freed between forward and backward.
        is_active: whether backward has reached the module's outputs and is not through with its parameters.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: Sequence[FlatParameters], *, reshard: bool, find_unused: bool
    ) -> None:
        self.name, self.module, self.flats = name, module, list(flats)
        self.reshard, self.find_unused = reshard, find_unused
        self.is_whole = self.is_active = False
        self.sync = True
        self.pending: list[Work] = []
        self.settling: list[Callable[[bool], None]] = []  # shared with the other units of a root
        self.held: list[Held] = []
        self.observers: list[Callable[[], None]] = []
        self.reach: Callable[[Unit], None] = Unit.begin_backward

    # --- values ---

    def begin_gather(self) -> None:
        """Gather in the background, unless that has been done."""
        if not self.is_whole:
            self.check()
            self.make_room()
            works = [flat.gather(async_op=True) for flat in self.flats]
            self.pending = [work for work in works if work is not None]

    def check(self) -> None:
        for flat in self.flats:
            flat.check()

    def make_room(self) -> None:
        self.is_whole = True
        for flat in self.flats:
            flat.make_room()
        try:
            self.tell()
        except BaseException:  # a ledger's budget refuses it: nothing has been gathered
            self.is_whole = False
            for flat in self.flats:
                flat.free()
            raise

    def gather(self) -> None:
        """Have the parameters whole, and in the modules."""
        if not self.is_whole:
            self.check()
            self.make_room()
            for flat in self.flats:
                flat.gather()
        self.wait()
        for flat in self.flats:
            flat.install(flat.unsharded)

    def wait(self) -> None:
        """Wait for what was begun in the background."""
        pending, self.pending = self.pending, []
        for work in pending:
            work.wait()

    def free(self) -> None:
        """Leave only the shards."""
        if self.is_whole:
            self.wait()
            for flat in self.flats:
                flat.free()
                flat.install(flat.pieces)
            self.is_whole = False
            self.tell()

    @property
    def is_stale(self) -> bool:
        return any(flat.is_stale for flat in self.flats)

    # --- gradients ---

    def begin_backward(self) -> None:
        """Backward has reached the module's outputs."""
        self.is_active = True
        for flat in self.flats:
            flat.await_all()

    def ready(self, flat: FlatParameters, index: int) -> None:
        """A whole gradient is complete."""
        if not self.is_active:  # its outputs were nothing that tells when backward reaches them
            self.reach(self)
        begins = flat.gradients is None
        flat.take(index, flat.axes.size if self.sync else 1)
        if begins:
            self.tell()
        if all(flat.is_ready for flat in self.flats):
            self.end_backward()

    def end_backward(self) -> None:
        """All gradients are here, or will not come: reduce them, and free the parameters."""
        self.is_active = False
        for flat in self.flats:
            for index, ready in enumerate(flat.ready):
                if not ready and (self.sync or flat.gradients is not None):
                    flat.take(index, flat.axes.size if self.sync else 1)
        self.free()
        for flat in self.flats:
            if flat.gradients is None:
                continue
            if self.sync:
                self.settle(IN_FLIGHT - 1)
                self.settling.append(flat.reduce(async_op=True, held=self.held if self.find_unused else None))
            else:
                flat.keep()

    def settle(self, allowed: int, *, wanted: bool = True) -> None:
        """Wait until at most `allowed` reductions are under way; take their results if they are `wanted`."""
        while len(self.settling) > allowed:
            self.settling.pop(0)(wanted)

    @property
    def is_trained(self) -> bool:
        return any(flat.is_trained for flat in self.flats)

    @property
    def has_gradients(self) -> bool:
        """Whether whole gradients are there: of a backward that runs, or accumulated."""
        return any(flat.gradients is not None for flat in self.flats)

    @property
    def missing(self) -> list[str]:
        """Trained parameters that await their gradients."""
        return [
            slot.name for flat in self.flats for slot, ready in zip(flat.slots, flat.ready, strict=True) if not ready
        ]

    # --- being watched ---

    @property
    def gathered_bytes(self) -> int:
        """Bytes of whole parameters that are there now."""
        return sum(flat.whole.untyped_storage().nbytes() for flat in self.flats)

    def tell(self) -> None:
        for observer in self.observers:
            observer()


def agree_on_use(held: list[Held]) -> None:
    """Give the pieces their gradients, where some rank has one: one byte a parameter, after all else."""
    if not held:
        return
    waiting = list(held)
    held.clear()
    flags = torch.tensor([flag for _, _, used in waiting for flag in used], dtype=torch.uint8)
    first = waiting[0][0]
    flags = flags.to(first.shard.device)
    first.axes.reduce_over_all(flags, ReduceOp.MAX)
    somewhere = [bool(flag) for flag in flags.tolist()]
    for flat, reduced, used in waiting:
        flat.add(reduced, somewhere[: len(used)])
        somewhere = somewhere[len(used) :]


def tell_recorder(units: Sequence[Unit]) -> None:
    """Record how many bytes of gathered parameters are there."""
    if recording():
        add_memory("gathered", sum(unit.gathered_bytes for unit in units))


def whole_tensors(units: Sequence[Unit]) -> list[torch.Tensor]:
    """The gathered parameters' tensors."""
    return [flat.whole for unit in units for flat in unit.flats]
