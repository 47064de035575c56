"""The arithmetic of reductions: how two contributions become one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

_IN_PLACE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
}


def check_op(op: Any, tensor: torch.Tensor) -> None:
    """Refuse an operation that is unknown, or an average of integers."""
    if op not in _IN_PLACE:
        raise ValueError(f"reduction {op!r} is not known; give ReduceOp.SUM, AVG, PRODUCT, MAX or MIN")
    if op == ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"an average of {tensor.dtype} is no {tensor.dtype}: convert it to float, or reduce with SUM")


def combination(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What puts a part into a total, in place: `combination(op)(total, part)`."""
    return _IN_PLACE[op]


def divide(total: torch.Tensor, op: Any, contributions: int) -> None:
    """Finish an average: divide by the number of contributions, in place; nothing for other operations."""
    if op == ReduceOp.AVG:
        total.div_(contributions)


def name_of_op(op: Any) -> str:
    """The reduction's name: "SUM", "AVG", ..."""
    return next(name for name in ("SUM", "AVG", "PRODUCT", "MAX", "MIN") if op == getattr(ReduceOp, name))
