"""`MemoryLedger`: what a training step holds, kind by kind, module by module, and the most of it at any moment."""

import contextlib
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from labkit.memory.accounts import Account
from labkit.memory.footprint import OUTSIDE, ROOT, Footprint
from labkit.memory.saved_tensors import watching


class MemoryLedger:
    """Counts the bytes that a module's training holds while the ledger is open.

        with Recorder() as record, MemoryLedger(model, optimizer) as ledger:
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        ledger.peak.by_kind(), ledger.by_module("activations"), show.memory_over_time(record, title=...)

    Counted are storages, each once, whole, however many views or tied parameters look at it:

    - "parameters", "buffers" and "gradients" of `module`, and "optimizer_state" of `optimizer`;
    - "inputs", what the module's forward was called with and needs no gradient;
    - "activations", what autograd holds for backward and is none of these, until its graph lets go of it. Each belongs
      to the innermost submodule whose forward was running. What checkpointing computes again counts while it is there.

    Not counted is what comes and goes within an operation or within backward (workspace, the gradients of activations),
    nor what was saved before the ledger was opened. Nothing is kept alive that would have been freed. Every change is
    added to the open Recorder; without one the ledger works alike.

    With `budget_bytes` what would exceed it raises MemoryBudgetError, in one sentence that says what did not fit.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None = None, *, budget_bytes: int | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"MemoryLedger counts the memory of a module, not of a {type(module).__name__}.")
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"budget_bytes must be at least 0, not {budget_bytes}.")
        self.module, self.optimizer, self.budget_bytes = module, optimizer, budget_bytes
        self._account = Account(budget_bytes)
        self._tracked: list[tuple[str, str, Any]] = []
        self._running = threading.local()
        self._names: dict[int, str] = {}  # of parameters, by identity, to their module
        self._exits: contextlib.ExitStack | None = None

    # --- what it says ---

    def now(self) -> Footprint:
        """What is alive now; after the ledger was closed, what was alive last."""
        self._look()
        return self._account.now()

    @property
    def peak(self) -> Footprint:
        """What was alive at the moment when it was most, since the ledger was opened or the peak was reset."""
        return self._account.highest()

    def by_module(self, kind: str | None = None) -> dict[str, int]:
        """The bytes of each submodule at the peak, of one `kind` or of all."""
        return self.peak.by_module(kind)

    def reset_peak(self) -> None:
        """Look for the peak anew, from now on."""
        self._account.forget_peak()

    # --- what it is told ---

    def track(self, kind: str, what: Any, *, module: str = OUTSIDE) -> None:
        """Count further tensors as `kind` until they die: targets, shards, buckets, gathered parameters.

        `what` is a tensor, a nesting of lists, tuples and dicts, or a function that returns one and is asked again
        whenever a submodule begins or ends, a gradient is ready, or the optimizer has stepped. What it does not return
        any more still counts as long as it lives.
        """
        if callable(what):
            self._tracked.append((kind, module, what))
            self._ask()
        elif self._exits is None:
            raise RuntimeError("The MemoryLedger is not open: call track inside of its with block.")
        else:
            self._account.own(kind, module, what)

    # --- open and closed ---

    def __enter__(self) -> Self:
        if self._exits is not None:
            raise RuntimeError("This MemoryLedger is open already: make another one.")
        self._account = Account(self.budget_bytes)
        self._running = threading.local()
        self._look()
        with contextlib.ExitStack() as exits:
            for name, module in self.module.named_modules():
                self._attach(exits, name or ROOT, module)
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    exits.callback(parameter.register_post_accumulate_grad_hook(self._gradient_is_ready).remove)
            if self.optimizer is not None:
                exits.callback(self.optimizer.register_step_pre_hook(self._optimizer_steps).remove)
                exits.callback(self.optimizer.register_step_post_hook(self._optimizer_steps).remove)
            exits.enter_context(watching((self._account, _Who(self._names, self._running, self._account))))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._exits is not None
        exits, self._exits = self._exits, None
        exits.close()
        self._account.close()

    def _attach(self, exits: contextlib.ExitStack, name: str, module: nn.Module) -> None:
        def begins(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if name == ROOT:
                self._stack().clear()  # what an interrupt has left
                self._look()
                self._account.own("inputs", ROOT, _plain((args, kwargs)))
            self._stack().append(name)
            self._ask()

        def ends(*_: Any) -> None:
            stack = self._stack()
            while name in stack and stack.pop() != name:
                pass
            self._ask()

        # behind the hooks that are there already, such as one that gathers the module's parameters
        exits.callback(module.register_forward_pre_hook(begins, with_kwargs=True).remove)
        exits.callback(module.register_forward_hook(ends, always_call=True).remove)

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        self._account.own("gradients", self._names.get(id(parameter), OUTSIDE), parameter.grad)
        self._ask()

    def _optimizer_steps(self, *_: Any) -> None:
        self._look()

    # --- looking ---

    def _look(self) -> None:
        """Count what module and optimizer hold now."""
        if not self._account.open:
            return
        for name, parameter in self.module.named_parameters():
            owner = self._names[id(parameter)] = name.rpartition(".")[0] or ROOT
            self._account.own("parameters", owner, parameter)
            if parameter.grad is not None:
                self._account.own("gradients", owner, parameter.grad)
        for name, buffer in self.module.named_buffers():
            self._account.own("buffers", name.rpartition(".")[0] or ROOT, buffer)
        if self.optimizer is not None:
            for stepped, state in self.optimizer.state.items():
                self._account.own("optimizer_state", self._names.get(id(stepped), OUTSIDE), state)
        self._ask()

    def _ask(self) -> None:
        if not self._account.open:
            return
        for kind, module, function in self._tracked:
            self._account.own(kind, module, function())

    def _stack(self) -> list[str]:
        return _stack(self._running)


class _Who:
    """Which submodule runs while autograd saves a tensor."""

    def __init__(self, names: dict[int, str], running: threading.local, account: Account) -> None:
        self.names, self.running, self.account = names, running, account

    def __call__(self, tensor: Tensor) -> str:
        base = tensor._base if tensor._is_view() else tensor
        if isinstance(base, Parameter) and id(base) in self.names:
            # its storage may be new since the last look, where shards are gathered for the time of a forward
            self.account.own("parameters", self.names[id(base)], base)
        stack = _stack(self.running)
        return stack[-1] if stack else OUTSIDE


def _stack(running: threading.local) -> list[str]:
    if not hasattr(running, "stack"):
        running.stack = []
    return running.stack  # type: ignore[no-any-return]


def _plain(inputs: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not leaf.requires_grad]
