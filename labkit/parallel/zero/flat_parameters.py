"""Flat parameters of stage 3: a shard of many parameters on every rank, and all of them while they are needed.

Source: S. Rajbhandari and others, ZeRO (SC20), arXiv:1910.02054, section 5.3; the flat layout: Y. Zhao and others,
PyTorch FSDP (VLDB 2023), arXiv:2304.11277, section 3.2.1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from labkit.collectives import Work, all_gather_into_tensor
from labkit.mesh import Placement, place
from labkit.parallel.zero.hybrid import ShardingAxes
from labkit.parallel.zero.layout import FlatLayout
from labkit.parallel.zero.scattering import reduce_scatter


@dataclass(eq=False)
class Slot:
    """A parameter before it is sharded: its name, and all places in modules where it is found, tied ones too."""

    name: str
    original: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


class FlatParameters:
    """Parameters of one dtype, trained or frozen all.

    Attributes:
        shard: this rank's part [part_length], of which `pieces` are views: what the optimizer steps.
        whole: all values [length], of which `unsharded` are views in the parameters' shapes: what the modules compute
            with. Its storage is empty while they are not gathered, so that what autograd has saved stays valid.
        gradients: whole gradients, from a backward's first one until they are reduced.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        axes: ShardingAxes,
        *,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        algorithm: str,
    ) -> None:
        originals = [slot.original for slot in slots]
        first, self.slots, self.axes, self.end = originals[0], list(slots), axes, axes.end
        self.algorithm = algorithm
        floating = first.is_floating_point()
        dtype = param_dtype if param_dtype is not None and floating else first.dtype
        self.reduce_dtype = reduce_dtype if reduce_dtype is not None and floating else dtype
        self.layout = FlatLayout.of([original.new_empty(0, dtype=dtype) for original in originals[:1]], self.end.size)
        self.layout = FlatLayout(tuple(tuple(one.shape) for one in originals), self.end.size, self.layout.align)
        filled = torch.empty(self.layout.length, dtype=first.dtype, device=first.device)
        self.layout.fill(filled, originals)
        axes.spread(filled)
        self.shard = self.layout.part(filled, self.end.place).clone()
        del filled
        self.pieces: list[nn.Parameter] = []
        for index, original in enumerate(originals):
            piece = self.layout.piece(index, self.end.place)
            values = self.shard[piece.at : piece.at + piece.numel]
            self.pieces.append(nn.Parameter(values, requires_grad=original.requires_grad))
            place(self.pieces[-1], axes.placement(Placement.of(original), piece.start, piece.stop))
        self.addresses = [piece.data_ptr() for piece in self.pieces]
        self.whole = torch.empty(self.layout.length, dtype=dtype, device=first.device)
        self.writer = self.whole.data  # writing through it does not look like a change of what autograd has saved
        self.unsharded = [nn.Parameter(view) for view in self.layout.views(self.whole)]
        self.gradients: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.accumulated = [False] * len(slots)
        self.nothing = self.shard.new_zeros(())
        self.marks: list[torch.Tensor | None] = [None] * len(slots)
        self.marked = 0
        self.is_whole, self.version = True, self.shard._version
        self.free()
        self.await_all()

    # --- values ---

    def make_room(self) -> None:
        """For the whole parameters."""
        self.whole.untyped_storage().resize_(self.layout.length * self.whole.element_size())
        self.is_whole = True

    def gather(self, *, async_op: bool = False) -> Work | None:
        """Make the parameters whole; with `async_op` they are when the work that is returned is done."""
        self.version = self.shard._version
        own = self.layout.part(self.writer, self.end.place)
        own.copy_(self.shard)
        for piece, parameter in zip(self.pieces, self.unsharded, strict=True):
            if parameter.requires_grad != piece.requires_grad:
                parameter.requires_grad_(piece.requires_grad)
        if self.end.size == 1:
            return None
        return all_gather_into_tensor(self.writer, own, self.end.group, async_op)

    def free(self) -> None:
        """Let go of the whole parameters."""
        if self.is_whole:
            self.whole.untyped_storage().resize_(0)
            self.is_whole = False

    def install(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put `unsharded` or `pieces` into the modules."""
        for slot, parameter in zip(self.slots, parameters, strict=True):
            for module, name in slot.owners:
                module._parameters[name] = parameter

    def check(self) -> None:
        """Raise RuntimeError where a piece is no longer the part of the shard that it was, so that what is computed
        with would not be what the module says it holds. To be called while they are in the modules."""
        for slot, piece, address in zip(self.slots, self.pieces, self.addresses, strict=True):
            there = all(module._parameters.get(name) is piece for module, name in slot.owners)
            if not there or piece.data_ptr() != address or piece.dtype != self.shard.dtype:
                raise RuntimeError(
                    f"fully_shard: on rank {self.end.members[self.end.place]} parameter {slot.name} was converted, "
                    "moved or replaced after it was sharded: do that before fully_shard, and load states without "
                    "assign=True"
                )

    @property
    def is_stale(self) -> bool:
        """Whether the shard has changed since it was gathered last."""
        return self.version != self.shard._version

    @property
    def is_trained(self) -> bool:
        return any(piece.requires_grad for piece in self.pieces)

    # --- gradients ---

    def await_all(self) -> None:
        """Await the gradients of all trained parameters."""
        for index, piece in enumerate(self.pieces):
            # zero_grad has removed or zeroed the mark of accumulated ones
            if piece.grad is None or (piece.grad is self.marks[index] and self.nothing._version != self.marked):
                self.accumulated[index] = False
        self.ready = [not piece.requires_grad for piece in self.pieces]
        self.used = list(self.accumulated)

    @property
    def is_ready(self) -> bool:
        return all(self.ready)

    def take(self, index: int, divisor: int) -> None:
        """Bring a gradient to its place, divided by `divisor`; None is zeros. Gradients kept before are added to."""
        if self.gradients is None:
            self.gradients = torch.empty(self.layout.length, dtype=self.reduce_dtype, device=self.shard.device)
            self.layout.clear_padding(self.gradients)
            self.views = self.layout.views(self.gradients)
        view, parameter = self.views[index], self.unsharded[index]
        gradient, parameter.grad = parameter.grad, None
        self.ready[index] = True
        self.used[index] = self.used[index] or gradient is not None
        if gradient is not None:
            if self.accumulated[index]:
                view.add_(gradient)
            elif divisor == 1:
                view.copy_(gradient)
            elif gradient.dtype == view.dtype:
                torch.div(gradient, divisor, out=view)
                return
            else:
                view.copy_(gradient)
        elif not self.accumulated[index]:
            view.zero_()
        if divisor > 1:
            view.div_(divisor)

    def keep(self) -> None:
        """Keep the gradients whole for the next backward to add to: they are neither divided nor reduced."""
        for index, (piece, used) in enumerate(zip(self.pieces, self.used, strict=True)):
            self.accumulated[index] = self.accumulated[index] or used
            if self.accumulated[index] and piece.grad is None:
                # zeros that take no room: where zero_grad touches them, what was accumulated is to be forgotten
                piece.grad = self.marks[index] = self.nothing.expand(piece.shape)
        self.marked = self.nothing._version

    def forget(self) -> None:
        """Forget whole gradients."""
        self.gradients, self.views, self.accumulated = None, [], [False] * len(self.slots)
        for index, piece in enumerate(self.pieces):
            if piece.grad is not None and piece.grad is self.marks[index]:
                piece.grad = None
        self.marks = [None] * len(self.slots)

    def reduce(self, *, async_op: bool, held: "list[Held] | None" = None) -> Callable[[bool], None]:
        """Sum the gradients over the ranks; what is returned waits for it, and if it is given True, gives the pieces
        their parts. With `held` they are put there instead."""
        assert self.gradients is not None
        whole, used = self.gradients, list(self.used)
        output = torch.empty(self.layout.part_length, dtype=whole.dtype, device=whole.device)
        work = reduce_scatter(output, whole, self.end, algorithm=self.algorithm, async_op=async_op)
        self.forget()

        def settle(wanted: bool) -> None:
            nonlocal whole
            if work is not None:
                work.wait()
            del whole
            if not wanted:
                return
            self.axes.sum_between(output)
            reduced = output.to(self.shard.dtype)
            if held is None:
                self.add(reduced, used)
            else:
                held.append((self, reduced, used))

        return settle

    def add(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        """Give the pieces their gradients, or add to those they have."""
        for index, piece in enumerate(self.pieces):
            if not used[index] or not piece.requires_grad:
                continue
            at = self.layout.piece(index, self.end.place).at
            gradient = reduced[at : at + piece.numel()]
            if piece.grad is None:
                piece.grad = gradient
            else:
                piece.grad.add_(gradient)


#: parameters, this rank's part of their reduced gradients, and which of them have one here
Held: TypeAlias = tuple[FlatParameters, torch.Tensor, list[bool]]
