"""The course of a step through the units of stage 3: who is next, so that it is gathered while the one before computes.

Each forward is taken to go through the units as the last one did; backward goes the other way. A guess that is wrong
costs a gather too many, nothing else. Source: Y. Zhao and others, PyTorch FSDP (VLDB 2023), arXiv:2304.11277, section
3.3.2 and 3.3.3: backward and forward prefetching.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from labkit.parallel.zero.flat_parameters import Held
from labkit.parallel.zero.unit import Unit, agree_on_use, tell_recorder


def in_backward() -> bool:
    """Whether this thread is inside of a backward."""
    return torch._C._current_graph_task_id() >= 0


class Course:
    """The units under one root, and how far the running step is."""

    def __init__(self, root: Unit, units: Sequence[Unit], *, prefetch: bool) -> None:
        self.root, self.units, self.prefetch = root, list(units), prefetch
        self.expected: list[Unit] = []  # of the last forward
        self.sequence: list[Unit] = []  # of this one
        self.tasks: dict[int, list[Unit]] = {}  # running backwards, with the units that each has reached
        self.held: list[Held] = []  # reduced, until it is known which parameters have a gradient somewhere
        for unit in self.units:
            unit.settling, unit.held = root.settling, self.held
            unit.observers.append(self.tell)
            unit.reach = self.reach

    def tell(self) -> None:
        tell_recorder(self.units)

    # --- forward ---

    def begin_forward(self) -> None:
        """The root begins a forward: put right what an error has left, and forget values that were stepped since."""
        self.tasks.clear()
        self.held.clear()
        self.root.settle(0, wanted=False)  # of a backward that failed
        for unit in self.units:
            if unit.is_active:
                unit.is_active = False
                for flat in unit.flats:
                    flat.forget()
                unit.free()
            elif unit.is_whole and unit.is_stale:
                unit.free()
        if self.sequence:
            self.expected = self.sequence
        self.sequence = []

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins."""
        unit.gather()
        if in_backward():
            return
        place = len(self.sequence)
        self.sequence.append(unit)
        if self.prefetch and place + 1 < len(self.expected) and self.expected[place] is unit:
            self.expected[place + 1].begin_gather()

    def leave(self, unit: Unit, *, keep: bool) -> None:
        """A unit's forward has ended. `keep` where nothing can tell when backward reaches it."""
        if in_backward() or keep or (torch.is_grad_enabled() and not unit.reshard):
            return
        unit.free()

    # --- backward ---

    def reach(self, unit: Unit) -> None:
        """Backward has reached the outputs of a unit."""
        if unit.is_active:
            return
        task = torch._C._current_graph_task_id()
        if task not in self.tasks:
            self.tasks[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end(task))
        self.tasks[task].append(unit)
        if unit.flats and unit.is_stale:
            raise RuntimeError(
                f"fully_shard: the parameters of {unit.name or 'the root'} were changed between a forward and its "
                "backward: call backward first, then step the optimizer"
            )
        unit.begin_backward()
        unit.gather()
        if self.prefetch and (following := self.before(unit)) is not None:
            following.begin_gather()

    def before(self, unit: Unit) -> Unit | None:
        """The unit that backward reaches next."""
        others = [one for one in self.sequence if one is not self.root]
        if unit is self.root:
            return others[-1] if others else None
        place = others.index(unit) if unit in others else 0
        return others[place - 1] if place else None

    def pass_inputs(self, unit: Unit) -> None:
        """Backward is through with a unit's inputs: a frozen one is not needed any more."""
        if unit.is_active and not unit.missing:
            unit.end_backward()

    def end(self, task: int) -> None:
        """A backward has ended: see to what was not ready, and wait for the reductions."""
        reached = self.tasks.pop(task, [])
        computed = any(unit.has_gradients or (unit.is_trained and not unit.is_active) for unit in reached)
        for unit in reached:
            if unit.is_active:
                if not computed:  # nobody asked for any: torch.autograd.grad of the inputs
                    unit.is_active = False
                    unit.free()
                    continue
                if unit.missing and unit.sync and not unit.find_unused:
                    self.refuse_unused(unit)
                unit.end_backward()
        if not self.tasks:
            for unit in self.units:  # those that this backward left out, but others under `no_sync` did not
                if unit.sync and unit.has_gradients:
                    unit.begin_backward()
                    unit.end_backward()
        self.root.settle(0)
        if not self.tasks:
            agree_on_use(self.held)
            for unit in self.units:  # gathered ahead in vain
                if unit.is_whole and not unit.is_active:
                    unit.free()

    def refuse_unused(self, unit: Unit) -> None:
        names = unit.missing
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        here = unit.flats[0].end
        raise RuntimeError(
            f"fully_shard: rank {here.members[here.place]} computed no gradient for {', '.join(names[:5])}{more}: use "
            "them in every forward and in the loss, freeze them (requires_grad=False) before, or pass "
            "find_unused_parameters=True"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before = [unit.sync for unit in self.units]
        for unit in self.units:
            unit.sync = False
        try:
            yield
        finally:
            for unit, sync in zip(self.units, before, strict=True):
                unit.sync = sync
