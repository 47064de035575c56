"""What can't be wrapped, each in a sentence."""

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from labkit.collectives.all_reduction import ALGORITHMS
from labkit.parallel.data_parallel.marking import is_wrapped


def refuse_bad(module: Any, bucket_cap_mb: Any, algorithm: Any) -> None:
    """Raise TypeError or ValueError, in one sentence, for arguments or a model that data parallel can't work with."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"DistributedDataParallel: module is a {type(module).__name__}; give an nn.Module")
    if not isinstance(bucket_cap_mb, int | float) or not bucket_cap_mb > 0:
        raise ValueError(f"DistributedDataParallel: bucket_cap_mb is {bucket_cap_mb!r}; give megabytes above 0")
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"DistributedDataParallel: algorithm {algorithm!r} is not known; give one of {sorted(ALGORITHMS)}"
        )
    if any(isinstance(one, nn.parallel.DistributedDataParallel) for one in module.modules()):
        raise ValueError("DistributedDataParallel: the module is in PyTorch's wrapper already; wrap its .module")
    trained = False
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"DistributedDataParallel: parameter {name} has no shape yet; run one forward, then wrap")
        if parameter.is_sparse or parameter.is_meta:
            raise ValueError(f"DistributedDataParallel: parameter {name} is sparse or has no data; give it dense data")
        if is_wrapped(parameter):
            raise ValueError(f"DistributedDataParallel: parameter {name} is wrapped already; wrap a module once")
        trained = trained or parameter.requires_grad
    if not trained:
        raise ValueError("DistributedDataParallel: no parameter needs a gradient, so there is nothing to average")
