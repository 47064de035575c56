"""Which blocks of a network are checkpointed, and in how large pieces.

A group of consecutive blocks is one checkpoint: its first block, when it is called, runs them all in one checkpoint;
the others, which the network calls next with just what came out, hand that on. So the network's own forward, its
modules and the names of its parameters stay as they are.

Source of "sqrt": T. Chen and others, Training Deep Nets with Sublinear Memory Cost (2016), arXiv:1604.06174,
section 4.1: L/k pieces of k layers hold L/k + k of them at once, least at k = sqrt(L).
"""

import copy
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from labkit.memory.checkpointing import checkpoint
from labkit.memory.kept_operations import EXPENSIVE, create_selective_checkpoint_contexts
from labkit.memory.recomputing_hooks import Contexts, no_contexts
from labkit.models.encoder import Transformer
from labkit.models.residual import ResidualNetwork

_Model = TypeVar("_Model", bound=nn.Module)
Policy = str | int | Sequence[range]
POLICIES = ("none", "sqrt", "selective")


def checkpoint_blocks(
    model: _Model, policy: Policy, *, blocks: Sequence[nn.Module] | None = None, use_reentrant: bool = False
) -> _Model:
    """Checkpoint the blocks of `model` by `policy`, in place, and return it. Names of parameters don't change.

    - "none": as it was; takes back what an earlier call did.
    - k, an int of 1 or more: every k consecutive blocks are one checkpoint.
    - "sqrt": k is the square root of the number of blocks, rounded.
    - "selective": each block is one, but the outputs of products, convolutions and fused attention are kept.
    - ranges of block numbers, as `best_groups` gives them: each is one checkpoint, blocks in none are held as ever.

    The blocks are those of labkit's transformer and residual network, the steps of an nn.Sequential, or `blocks`, in
    the order in which forward calls them, each with the output of the one before as its first argument and otherwise
    the same arguments. Cut a model into pipeline stages first, then checkpoint each stage.

    ValueError in one sentence for a policy or a model that it can't do with.
    """
    found = list(blocks) if blocks is not None else blocks_of(model)
    groups, places = groups_of(policy, len(found)), dict[nn.Module, int]()
    for number, block in enumerate(found):
        first = places.setdefault(block, number)
        if first < number and groups:
            raise ValueError(
                f"checkpoint_blocks: block {number} is block {first} once more, a {type(block).__name__}, and can be "
                "in one checkpoint only: call labkit.memory.checkpoint in the model's forward instead."
            )
    for block in found:
        ours = block.__dict__.get("forward")
        if isinstance(ours, _Forward):
            ours.undo()
    contexts = selective_contexts if policy == "selective" else no_contexts
    for numbers in groups:
        group = _Group([found[number] for number in numbers], contexts, use_reentrant)
        for place, block in enumerate(group.blocks):
            block.forward = _Forward(group, place, block.__dict__.get("forward"))
    return model


selective_contexts: Contexts = partial(create_selective_checkpoint_contexts, EXPENSIVE)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that is not wrapped, in the order of forward."""
    if isinstance(model, Transformer):
        return list(model.blocks)
    if isinstance(model, ResidualNetwork):
        return [block for name in model._stage_names for block in model.get_submodule(name).children()]
    if isinstance(model, nn.Sequential):
        return list(model)
    raise ValueError(
        f"checkpoint_blocks knows the blocks of labkit's models and of nn.Sequential, not those of "
        f"{type(model).__name__}: give them as blocks=[...], and wrap a model after it."
    )


def are_checkpointed(blocks: Sequence[nn.Module]) -> bool:
    """Whether `checkpoint_blocks` has made checkpoints of some."""
    return any(isinstance(block.__dict__.get("forward"), _Forward) for block in blocks)


def groups_of(policy: Policy, count: int) -> list[range]:
    """The groups of block numbers, of `count`, that the policy makes checkpoints of."""
    if isinstance(policy, bool) or not isinstance(policy, str | int | Sequence):
        raise ValueError(_refusal(policy))
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(_refusal(policy))
        if policy == "none":
            return []
        policy = 1 if policy == "selective" else max(1, round(math.sqrt(count)))
    if isinstance(policy, int):
        if policy < 1:
            raise ValueError(_refusal(policy))
        return [range(start, min(start + policy, count)) for start in range(0, count, policy)]
    if any(not isinstance(numbers, Sequence) for numbers in policy):
        raise ValueError(_refusal(policy))
    groups = [numbers for numbers in policy if len(numbers)]
    taken = [number for numbers in groups for number in numbers]
    if taken != sorted(set(taken)) or (taken and not 0 <= taken[0] <= taken[-1] < count):
        raise ValueError(f"The ranges {groups} must be apart, in order, and within the {count} blocks.")
    return groups


def _refusal(policy: object) -> str:
    listed = ", ".join(map(repr, POLICIES))
    return f"checkpoint must be {listed}, a number of blocks, 1 or more, or a list of ranges, not {policy!r}."


class _Group:
    """Consecutive blocks that are one checkpoint."""

    def __init__(self, blocks: list[nn.Module], contexts: Contexts, use_reentrant: bool) -> None:
        self.blocks, self.contexts, self.use_reentrant = blocks, contexts, use_reentrant
        self.here = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "here": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.here = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Group":
        twin = memo[id(self)] = _Group([], self.contexts, self.use_reentrant)
        twin.blocks = copy.deepcopy(self.blocks, memo)
        return twin

    @property
    def module(self) -> nn.Module:
        """The block whose call runs them all."""
        return self.blocks[0]

    @property
    def described(self) -> str:
        """Its name in messages."""
        name = type(self.blocks[0]).__name__
        return (
            f"the block {name}" if len(self.blocks) == 1 else f"the group of {len(self.blocks)} blocks from {name} on"
        )

    @property
    def running(self) -> bool:
        """Whether its blocks are being called as a part of it."""
        return getattr(self.here, "running", False)

    def run(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """All blocks in turn; also what a recomputation runs."""
        if self.awaited:
            names = f"{self.awaited} of the {len(self.blocks)} blocks"
            raise RuntimeError(
                f"checkpoint_blocks: {names} of one checkpoint were not called after the first, or not with what came "
                "out of the one before: cut a model into stages first, then checkpoint each."
            )
        self.here.running = True
        try:
            # the hooks of the first have run when the network called it
            x = self.module.forward(x, *args, **kwargs)
            for block in self.blocks[1:]:
                x = block(x, *args, **kwargs)
        finally:
            self.here.running = False
        return x

    @property
    def awaited(self) -> int:
        """How many blocks are still to be called with what the group has put out."""
        return getattr(self.here, "awaited", 0)

    def lead(self, *args: Any, **kwargs: Any) -> Any:
        """What the first block does when the network calls it."""
        self.here.awaited = 0
        output = checkpoint(self.run, *args, use_reentrant=self.use_reentrant, **self._options(), **kwargs)
        if len(self.blocks) > 1:
            self.here.awaited = len(self.blocks) - 1
            # a tensor must not live on for this; anything else that blocks pass on can't be watched
            self.here.output = weakref.ref(output) if isinstance(output, Tensor) else lambda: output
        return output

    def hands_on(self, x: Any) -> bool:
        """Whether `x` is what this group has put out, with blocks yet to be called."""
        if not self.awaited or self.here.output() is not x:
            return False
        self.here.awaited -= 1
        if not self.here.awaited:
            self.here.output = None
        return True

    def _options(self) -> dict[str, Any]:
        return {} if self.contexts is no_contexts else {"context_fn": self.contexts}


class _Forward:
    """Takes the place of a block's forward."""

    def __init__(self, group: _Group, place: int, instead_of: Callable[..., Any] | None) -> None:
        self.group, self.place, self.instead_of = group, place, instead_of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group, block = self.group, self.group.blocks[self.place]
        if group.running:
            return self.plain(*args, **kwargs)
        if self.place == 0:
            return group.lead(*args, **kwargs)
        if group.hands_on(args[0] if args else None):
            return args[0]
        if block._backward_hooks or block._backward_pre_hooks:
            raise RuntimeError(
                f"checkpoint_blocks: {type(block).__name__} number {self.place + 1} of a checkpoint of "
                f"{len(group.blocks)} blocks has a backward hook, which needs a checkpoint around each block: use "
                "policy 1, or remove the hook."
            )
        raise RuntimeError(
            f"checkpoint_blocks: {type(block).__name__} number {self.place + 1} of a checkpoint of "
            f"{len(group.blocks)} blocks was called by itself, or not with what came out of the one before: cut a "
            "model into stages first, then checkpoint each."
        )

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        block = self.group.blocks[self.place]
        if self.instead_of is not None:
            return self.instead_of(*args, **kwargs)
        return type(block).forward(block, *args, **kwargs)

    def undo(self) -> None:
        block = self.group.blocks[self.place]
        if self.instead_of is None:
            del block.forward
        else:
            block.forward = self.instead_of
