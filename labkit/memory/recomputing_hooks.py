"""Checkpointing by saved-tensor hooks: autograd records the function as ever, but gets tickets in place of tensors.

In forward the pack hook gives autograd a ticket for each tensor that it wants to save, and keeps nothing. In backward
the first ticket that is handed in makes the function run again, with hooks that put each saved tensor, in the order of
saving, beside its ticket. The recomputation ends with the last tensor that is needed. The graph that it makes is thrown
away: gradients go through the first one, which is why this form knows inputs without gradient, keyword arguments,
several backward passes, `autograd.grad` and higher derivatives.

Sources: T. Chen and others, Training Deep Nets with Sublinear Memory Cost (2016), arXiv:1604.06174, section 4; the
hooks: torch.autograd.graph.saved_tensors_hooks in the documentation of PyTorch.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from labkit.memory.differing_runs import CheckpointError, describe_function, describe_operation
from labkit.memory.kept_arguments import KeptCall
from labkit.memory.saved_tensors import Held
from labkit.memory.surroundings import Surroundings
from labkit.record import span

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def no_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a checkpoint runs in if nothing else is asked for."""
    return nullcontext(), nullcontext()


class _Enough(BaseException):
    """Ends a recomputation; no Exception, so that the function can't take it for one of its own."""


class Ticket:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "device", "dtype", "run", "shape", "value", "version")

    def __init__(self, run: "Run", tensor: Tensor) -> None:
        self.run = run  # as long as a ticket is there, so is what it can be computed from
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.version = _version(tensor)
        self.value: Held | None = None


class Run:
    """One checkpointed call, from its forward on."""

    def __init__(
        self, call: KeptCall, surroundings: Surroundings, contexts: Contexts, *, early_stop: bool, checks: bool
    ) -> None:
        self.call, self.surroundings = call, surroundings
        self.in_forward, self.in_recomputation = contexts()
        self.early_stop, self.checks = early_stop, checks
        self.tickets: list[weakref.ref[Ticket]] = []
        self.is_forward = False
        self.lock = threading.RLock()  # devices have a thread of backward each

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function for the first time."""
        tickets = self.tickets

        def pack(tensor: Tensor) -> Ticket:
            ticket = Ticket(self, tensor)
            tickets.append(weakref.ref(ticket))
            return ticket

        self.is_forward = True
        with self.surroundings.of_first_run(self.call.function), saved_tensors_hooks(pack, hand_in), self.in_forward:
            result = self.call.function(*args, **kwargs)
        self.is_forward = False
        return result

    def recompute(self) -> None:
        """Run it again and put each saved tensor beside its ticket."""
        tickets, count, number, through = self.tickets, len(self.tickets), 0, False
        # a backward inside of the function asks before its forward is through: no further than that then
        stops = self.early_stop or self.is_forward

        def pack(tensor: Tensor) -> Held:
            nonlocal number, through
            if through:  # the function has caught the end, and goes on
                raise _Enough
            if number >= count:
                raise CheckpointError(self._more(count))
            ticket = tickets[number]()
            number += 1
            held = Held(tensor)
            if ticket is not None:  # the graph still has it
                if self.checks:
                    self._check(ticket, tensor, number)
                ticket.value = held
            if stops and number == count:
                through = True
                raise _Enough
            return held

        args, kwargs = self.call.arguments()  # for which an outer checkpoint may have to recompute first
        try:
            with span("recomputation", "checkpoint"), torch.enable_grad(), self.surroundings.set_back():
                with saved_tensors_hooks(pack, Held.unpack), self.in_recomputation:
                    self.call.function(*args, **kwargs)
        except BaseException:
            if not through:  # TorchScript makes an error of its own of what is raised within
                raise
        if self.checks and number < count:
            raise CheckpointError(self._fewer(number, count))

    # --- a function that is not the same twice ---

    def _check(self, ticket: Ticket, tensor: Tensor, number: int) -> None:
        if ticket.shape == tensor.shape and ticket.dtype is tensor.dtype and ticket.device == tensor.device:
            before, now = ticket.version, _version(tensor)
            if before is None or now is None or now == before or now[0] != before[0]:
                return
            raise CheckpointError(
                f"checkpoint: a parameter of shape {list(tensor.shape)} that {self._name} uses in "
                f"{describe_operation()} was changed between forward and backward: call backward before the "
                "optimizer's step."
            )
        was, is_now = (_kind(one, other=two) for one, two in ((ticket, tensor), (tensor, ticket)))
        raise CheckpointError(
            f"checkpoint: {self._name} is not the same twice: {describe_operation()} saves a tensor of {is_now} for "
            f"backward in the recomputation, and forward had saved one of {was} there (number {number} of "
            "those that it saved). Let it depend on its arguments and on PyTorch's random states only."
        )

    def _more(self, count: int) -> str:
        return (
            f"checkpoint: {self._name} is not the same twice: in the recomputation it saves more than the {count} "
            f"tensors that forward had saved, the next in {describe_operation()}. Let it depend on its arguments and "
            "on PyTorch's random states only."
        )

    def _fewer(self, number: int, count: int) -> str:
        return (
            f"checkpoint: {self._name} is not the same twice: its recomputation ends after {number} of the {count} "
            "tensors that forward had saved. Let it depend on its arguments and on PyTorch's random states only."
        )

    @property
    def _name(self) -> str:
        return describe_function(self.call.function)


def hand_in(ticket: Ticket) -> Tensor:
    """The tensor for a ticket: the unpack hook."""
    run = ticket.run
    with run.lock:
        if ticket.value is None:
            run.recompute()
            if torch._C._current_graph_task_id() >= 0:
                _forget_at_the_end(weakref.ref(run))
        value = ticket.value
        if value is None:
            raise CheckpointError(run._fewer(0, len(run.tickets)))
        if torch._C._current_graph_task_id() < 0:
            _forget(run)
        elif torch._C._autograd._get_current_graph_task_keep_graph():
            ticket.value = None  # autograd will not let go of the ticket after this
        return value.unpack()


def _forget_at_the_end(reference: "weakref.ref[Run]") -> None:
    """What this backward does not ask for must not stay behind it."""

    def ended() -> None:
        run = reference()
        if run is not None:
            _forget(run)

    torch.autograd.Variable._execution_engine.queue_callback(ended)


def _forget(run: Run) -> None:
    for reference in run.tickets:
        ticket = reference()
        if ticket is not None:
            ticket.value = None


def _version(tensor: Tensor) -> tuple[int, int] | None:
    """Which parameter a tensor is, or a view of, and how often that was changed; None if it is none. A weight that an
    optimizer changes meanwhile would give another result, without a word."""
    base = tensor._base if tensor._is_view() else tensor
    return (id(base), tensor._version) if type(base) is Parameter else None


def _kind(one: Any, *, other: Any) -> str:
    parts = [f"shape {list(one.shape)}"]
    if one.dtype is not other.dtype:
        parts.append(str(one.dtype))
    if one.device != other.device:
        parts.append(f"on {one.device}")
    return ", ".join(parts)
