"""Cutting a batch into micro-batches along its first dim, and putting outputs together again."""

from typing import Any

import torch
from torch import Tensor


def sizes_of(rows: int, count: int) -> list[int]:
    """The rows of each micro-batch: they differ by at most one, the longer ones first. Fewer than `count` where there
    are not as many rows."""
    count = min(rows, count)
    each, longer = divmod(rows, count)
    return [each + (number < longer) for number in range(count)]


def rows_in(values: Any) -> int | None:
    """The first dim of the first tensor in a nesting of tuples, lists and dicts; None where there is none."""
    if isinstance(values, Tensor):
        return len(values) if values.dim() else None
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ()
    return next((rows for rows in map(rows_in, parts) if rows is not None), None)


def cut(values: Any, sizes: list[int], what: str) -> list[Any]:
    """One piece a micro-batch: tensors are cut along their first dim, anything else goes to all as it is."""
    if isinstance(values, Tensor) and values.dim():
        if len(values) != sum(sizes):
            raise ValueError(
                f"pipeline: {what} has {len(values)} rows, but the batch has {sum(sizes)}: give both the same rows"
            )
        return list(values.split(sizes))
    if isinstance(values, dict):
        columns = {key: cut(value, sizes, what) for key, value in values.items()}
        return [{key: column[number] for key, column in columns.items()} for number in range(len(sizes))]
    if isinstance(values, tuple | list):
        columns_of = [cut(value, sizes, what) for value in values]
        return [type(values)(column[number] for column in columns_of) for number in range(len(sizes))]
    return [values] * len(sizes)


def put_together(outputs: list[Any]) -> Any:
    """The outputs of all micro-batches as one: tensors joined along their first dim, in tuples and dicts too. What
    can't be joined stays a list."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.dim() else torch.stack(outputs)
    if isinstance(first, tuple) and not hasattr(first, "_fields"):
        return tuple(put_together([output[number] for output in outputs]) for number in range(len(first)))
    if isinstance(first, dict):
        return {key: put_together([output[key] for output in outputs]) for key in first}
    return outputs
