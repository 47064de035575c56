"""The arguments of a call, kept until the call is made once more."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from labkit.memory.saved_tensors import Held


class KeptCall:
    """A function and its arguments, as the leaves of (positional, keyword) and how they are arranged.

    Tensors are kept as autograd keeps them: by the hooks that are on when this is made, if there are any. So what is
    around decides: an outer checkpoint keeps nothing of them and computes them again, offloading writes them away, a
    ledger counts them.
    """

    __slots__ = ("function", "leaves", "spec")

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec) -> None:
        self.function, self.spec = function, spec
        kept = {id(leaf): _KeptTensor(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        self.leaves = [kept[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def arguments(self) -> Any:
        """Positional and keyword arguments; tensors have no history, but need a gradient where they did."""
        # one that was given twice is the same one again: attention asks whether its key is its query
        taken = {leaf: leaf.take() for leaf in self.leaves if isinstance(leaf, _KeptTensor)}
        leaves = [taken[leaf] if isinstance(leaf, _KeptTensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


class _KeptTensor:
    __slots__ = ("packed", "requires_grad", "unpack")

    def __init__(self, tensor: Tensor) -> None:
        self.requires_grad = tensor.requires_grad
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if tensor.is_inference():  # autograd saves none, and they can't be changed
            hooks = (_as_it_is, _as_it_is)
        pack, self.unpack = (Held, Held.unpack) if hooks is None else hooks
        self.packed = pack(tensor)

    def take(self) -> Tensor:
        unpack: Any = self.unpack
        tensor: Tensor = unpack(self.packed)
        return tensor.detach().requires_grad_(self.requires_grad)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
