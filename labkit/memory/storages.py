"""The storages behind tensors: what really takes memory, however many tensors look at it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages(held: Any) -> Iterator[torch.UntypedStorage]:
    """The storage of each tensor in `held`, a tensor or any nesting of lists, tuples and dicts; others are passed over.

    Views of one storage give that storage, whole, each time. Sparse tensors have several, as have subclasses that wrap
    other tensors (DTensor is one).
    """
    for tensor in tree_leaves(held):
        if isinstance(tensor, Tensor):
            yield from _of(tensor)


def _of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _of(getattr(wrapper, name))
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout == torch.sparse_coo:
        yield from _of(tensor._indices())
        yield from _of(tensor._values())
    elif tensor.layout in _COMPRESSED:
        for name in _COMPRESSED[tensor.layout]:
            yield from _of(getattr(tensor, name)())
