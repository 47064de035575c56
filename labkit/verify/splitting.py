"""Cutting the whole batch into the ranks' shares, and a share into micro-batches."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def even_sizes(total: int, parts: int) -> list[int]:
    """The sizes of `parts` contiguous shares of `total` rows: they differ by at most one, the longer ones first."""
    share, longer = divmod(total, parts)
    return [share + (part < longer) for part in range(parts)]


def rows_of(value: Any) -> int:
    """How many rows a batch has: the first dim of its first tensor."""
    if isinstance(value, Tensor):
        return len(value)
    parts = list(value.values()) if isinstance(value, dict) else list(value)
    return rows_of(parts[0])


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """`value` (a tensor, or a tuple, list or dict of them) cut along the first dim into parts of these sizes."""
    if isinstance(value, Tensor):
        return list(value.split(list(sizes)))
    if isinstance(value, dict):
        columns = {key: split(part, sizes) for key, part in value.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(len(sizes))]
    if isinstance(value, tuple | list):
        rows = zip(*(split(part, sizes) for part in value), strict=True)
        return [type(value)(row) for row in rows]
    raise TypeError(f"a batch is made of tensors, tuples, lists and dicts, not of {type(value).__name__}")


def to_dtype(value: Any, dtype: Any) -> Any:
    """The same batch with its floating-point tensors in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_dtype(part, dtype) for key, part in value.items()}
    return type(value)(to_dtype(part, dtype) for part in value)
