"""Selective checkpointing: the outputs of some operations are kept, and a recomputation takes them as they are.

A matrix product costs much time for the memory of its output, a norm or an activation function little. So the products
are kept and the rest is computed again. A dispatch mode sits below autograd: autograd records every operation of the
recomputation and saves its inputs as ever, but what is kept is not computed.

Source of the idea: V. Korthikanti and others, Reducing Activation Recomputation in Large Transformer Models (2022),
arXiv:2205.05198, section 5. There the inside of attention is computed again; fused kernels do that by themselves.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from labkit.memory.differing_runs import CheckpointError
from labkit.memory.random_states import RandomStates
from labkit.memory.saved_tensors import Held

_ATEN = torch.ops.aten
#: What policy "selective" keeps: products, convolutions, fused attention. The plain form of attention is made of bmm,
#: whose outputs are as large as the softmax: that is computed again.
EXPENSIVE = tuple(
    getattr(_ATEN, name).default
    for name in (
        "mm",
        "addmm",
        "convolution",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(_ATEN, name)
)
_ALIASES = {_ATEN.detach.default}


@dataclass(frozen=True)
class SelectiveCheckpointContext:
    """What a policy function is told besides the operation and its arguments."""

    is_recompute: bool


Policy = Callable[..., bool] | Collection[Any]


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy, allow_cache_entry_mutation: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The two contexts of a checkpoint that keeps the outputs of some operations; give it as `context_fn`:

        checkpoint(block, x, context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]))

    A policy function is called in forward as policy(context, operation, *args, **kwargs), on each operation of ATen,
    and says whether the output is kept. An output that the function changes in place after it was kept is an error,
    unless `allow_cache_entry_mutation`.
    """
    kept = _Kept(policy_fn_or_list, allow_cache_entry_mutation)
    return _Keeping(kept), _Taking(kept)


class _Kept:
    """Outputs by operation, in the order of its calls; None for a call whose output is not kept."""

    def __init__(self, policy: Policy, may_change: bool) -> None:
        self.policy = policy if callable(policy) else None
        self.chosen: frozenset[Any] = frozenset() if callable(policy) else frozenset(policy)
        packets = [one for one in self.chosen if not isinstance(one, torch._ops.OpOverload)]
        if packets:
            raise TypeError(f"{packets[0]} is no single operation of ATen: give it as torch.ops.aten.mm.default.")
        self.outputs: dict[Any, list[Any]] = {}
        self.drawn: dict[tuple[Any, int], RandomStates] = {}  # the random states after a call whose output is kept
        self.fetched: dict[Any, list[Any]] = {}
        # as autograd's own: what is around the checkpoint decides how tensors are kept
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            hooks = (Held, _unchecked if may_change else Held.unpack)
        self.pack, self.unpack = hooks

    def keep(self, operation: Any, args: Any, kwargs: Any, output: Any) -> None:
        chosen = operation in self.chosen
        if self.policy is not None:
            chosen = bool(self.policy(SelectiveCheckpointContext(False), operation, *args, **kwargs))
        elif not chosen:
            return
        calls = self.outputs.setdefault(operation, [])
        if chosen and torch.Tag.nondeterministic_seeded in operation.tags:
            devices = {one.device for one in tree_leaves(output) if isinstance(one, Tensor)}
            own = kwargs.get("generator")
            self.drawn[operation, len(calls)] = RandomStates(devices, [] if own is None else [own])
        calls.append(tree_map(self._pack, output) if chosen else None)

    def _pack(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # below autograd an alias has a count of changes of its own, unless this layer takes part
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return _Packed(self.pack(value.detach()))

    def take(self, operation: Any, number: int) -> Any:
        """What was kept of this call of the operation; None if nothing was."""
        outputs = self.fetched.get(operation, [])
        if number >= len(outputs):
            raise CheckpointError(
                f"checkpoint: the recomputation calls {operation} more often than forward did ({len(outputs)} times): "
                "the function is not the same twice."
            )
        return tree_map(_alias, outputs[number])

    def fetch(self) -> None:
        """Have what was kept at hand for a recomputation."""
        self.fetched = {operation: tree_map(self._unpack, each) for operation, each in self.outputs.items()}

    def let_go(self) -> None:
        self.fetched = {}

    def _unpack(self, one: Any) -> Any:
        return self.unpack(one.value) if isinstance(one, _Packed) else one


def _alias(value: Any) -> Any:
    # autograd makes its own what an operation returns
    return value.detach() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class _Packed:
    value: Any


def _unchecked(held: Held) -> Tensor:
    return held.tensor


class _Keeping(TorchDispatchMode):
    """Forward: every operation is computed, some outputs are kept."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func not in _ALIASES:
            self.kept.keep(func, args, kwargs, output)
        return output


class _Taking(TorchDispatchMode):
    """Recomputation: what was kept is taken, the rest computed."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.calls: dict[Any, int] = {}

    def __enter__(self) -> Any:
        self.calls = {}
        self.kept.fetch()  # not while an operation runs: an outer checkpoint may have to recompute it
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.kept.let_go()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ALIASES and (self.kept.policy is not None or func in self.kept.chosen):
            number = self.calls[func] = self.calls.get(func, -1) + 1
            output = self.kept.take(func, number)
            if output is not None:
                drawn = self.kept.drawn.get((func, number))
                if drawn is not None:  # what is computed after it draws what it drew in forward
                    drawn.put_back()
                return output
        return func(*args, **(kwargs or {}))
