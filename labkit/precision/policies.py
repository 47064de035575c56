"""Which treatment a call gets: from the function that PyTorch hands to a torch-function mode to its list."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from labkit.precision.cast_lists import LISTS

LOWER, FULL, FULL_OUTPUT, WIDEST = "lower", "full", "full_output", "widest"

_HOMES = (
    torch._C._VariableFunctions,
    torch._C.TensorBase,
    torch._C._nn,
    torch._C._linalg,  # type: ignore[attr-defined]
    torch._C._fft,  # type: ignore[attr-defined]
    torch._C._special,  # type: ignore[attr-defined]
)


@lru_cache(maxsize=2)
def _by_name(device_type: str) -> Mapping[str, str]:
    lists = LISTS[device_type]
    policies = dict.fromkeys(lists.lower | lists.lower_inside, LOWER)
    policies |= dict.fromkeys(lists.full | lists.full_inside, FULL)
    policies |= dict.fromkeys(lists.full_output, FULL_OUTPUT)
    policies |= dict.fromkeys(lists.widest | lists.widest_inside, WIDEST)
    return policies


@lru_cache(maxsize=2)
def policies(device_type: str) -> Mapping[Any, str]:
    """The treatment of every listed function that Python can call, by the function itself."""
    table: dict[Any, str] = {}
    for name, policy in _by_name(device_type).items():
        for home in _HOMES:
            function = getattr(home, name, None)
            if function is not None:
                table[function] = policy
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            table[packet] = policy
            table |= {getattr(packet, overload): policy for overload in packet.overloads() if "out" not in overload}
    return table


def _einsum_contracts(args: Sequence[Any]) -> bool:
    """Whether an index of two operands is summed over: only then does einsum become a product of matrices."""
    if not args or not isinstance(args[0], str):
        return True
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    operands = inputs.split(",")
    shared = {one for one in inputs if one.isalpha() and sum(one in operand for operand in operands) > 1}
    kept = set(output) if arrow else {one for one in shared if inputs.count(one) == 1}
    return bool(shared - kept)


def _inner_of_matrices(args: Sequence[Any]) -> bool:
    """Of two vectors it is a dot product, with a single number an elementwise one: both are on no list."""
    dims = [one.dim() for one in args if isinstance(one, torch.Tensor)]
    return bool(dims) and min(dims) > 0 and max(dims) > 1


def _tensordot_of_matrices(args: Sequence[Any]) -> bool:
    """Where nothing but the summed dims is left it is a dot product."""
    left, right, dims, _ = args
    return bool(max(left.numel(), right.numel()) > math.prod(left.shape[dim] for dim in dims))


def _pads_with_its_own(args: Sequence[Any]) -> bool:
    """Whether values of the tensor itself are repeated: only those kinds of padding are on a list."""
    return len(args) > 2 and args[2] in ("reflect", "replicate")


#: functions that are a product only for some arguments
DEPENDS: Mapping[Any, Callable[[Sequence[Any]], bool]] = {
    torch._C._VariableFunctions.einsum: _einsum_contracts,  # type: ignore[attr-defined]
    torch._C._VariableFunctions.inner: _inner_of_matrices,
    torch._C.TensorBase.inner: _inner_of_matrices,
    torch._C._VariableFunctions.tensordot: _tensordot_of_matrices,  # type: ignore[attr-defined]
    torch._C._nn.pad: _pads_with_its_own,
}
