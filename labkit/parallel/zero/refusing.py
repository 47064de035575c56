"""What ZeRO can't work with, each in a sentence."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, SparseAdam

from labkit.parallel.data_parallel.marking import is_wrapped
from labkit.parallel.zero.scattering import ALGORITHMS

#: optimizers of torch that don't step each element by itself
WHOLE_TENSOR = (LBFGS, Adafactor, Muon, SparseAdam)


def refuse_bad_optimizer(stage: Any, bucket_cap_mb: Any, algorithm: Any, optimizer_class: Any) -> None:
    """Raise ValueError for a wrong argument."""
    if stage not in (1, 2):
        more = "; stage 3 is labkit.parallel.fully_shard" if stage == 3 else ""
        raise ValueError(f"ZeroRedundancyOptimizer: stage is {stage!r}; give 1 or 2{more}")
    if not callable(optimizer_class):
        raise TypeError(
            f"ZeroRedundancyOptimizer: optimizer_class is {optimizer_class!r}; give a class such as torch.optim.AdamW"
        )
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, int | float) or not bucket_cap_mb > 0:
        raise ValueError(f"ZeroRedundancyOptimizer: bucket_cap_mb is {bucket_cap_mb!r}; give megabytes above 0")
    refuse_bad_algorithm(algorithm, "ZeroRedundancyOptimizer")


def refuse_bad_algorithm(algorithm: Any, who: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{who}: algorithm {algorithm!r} is not known; give one of {sorted(ALGORITHMS)}")


def refuse_whole_tensor_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError for one whose step of an element depends on others, which may lie on another rank."""
    if isinstance(optimizer, WHOLE_TENSOR):
        raise ValueError(
            f"ZeroRedundancyOptimizer: {type(optimizer).__name__} looks at whole tensors, of which a rank has parts "
            "only: give one that steps each element by itself, such as SGD or AdamW"
        )


def refuse_bad_sharding(reshard_after_forward: Any, **dtypes: Any) -> None:
    """Raise ValueError for a wrong argument of `fully_shard`."""
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ValueError(
            f"fully_shard: reshard_after_forward is {reshard_after_forward!r}; give True, False, or None for all but "
            "the root"
        )
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"fully_shard: {name} is {dtype!r}; give a floating-point dtype such as torch.bfloat16")


def refuse_bad_parameters(parameters: Sequence[nn.Parameter]) -> None:
    """Raise ValueError for parameters that can't be sharded, or whose gradients somebody else reduces."""
    for number, parameter in enumerate(parameters):
        what = f"ZeroRedundancyOptimizer: parameter {number}"
        if is_lazy(parameter):
            raise ValueError(f"{what} has no shape yet; run one forward, then build the optimizer")
        if parameter.is_sparse or parameter.is_meta:
            raise ValueError(f"{what} is sparse or has no data; give it dense data")
        if is_wrapped(parameter):
            raise ValueError(
                f"{what} is reduced by a DistributedDataParallel or another ZeroRedundancyOptimizer already, and would "
                "be averaged twice: give the parameters of the bare module"
            )
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("ZeroRedundancyOptimizer: no parameter needs a gradient, so there is nothing to step")


def refuse_bad_slot(name: str, parameter: nn.Parameter, *, wrapped: bool, sharded: bool) -> None:
    """Raise ValueError for a parameter that can't be put into a unit."""
    if is_lazy(parameter):
        raise ValueError(f"fully_shard: parameter {name} has no shape yet; run one forward, then shard")
    if parameter.is_sparse:
        raise ValueError(f"fully_shard: parameter {name} is sparse; give it dense data")
    if wrapped:
        raise ValueError(
            f"fully_shard: parameter {name} is reduced by a DistributedDataParallel or a ZeroRedundancyOptimizer "
            "already; shard the bare module"
        )
    if sharded:
        raise ValueError(
            f"fully_shard: parameter {name} is tied to one that is in another unit already: make the smallest module "
            "that holds both one unit"
        )
