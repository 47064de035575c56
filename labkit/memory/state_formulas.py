"""Bytes that training holds whatever the batch: parameters, gradients, optimizer state, buffers.

Sources: SGD with momentum keeps one number a trained parameter (Sutskever et al. 2013, ICML, equation 1), Adam and
AdamW two, the moments (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2019,
arXiv:1711.05101, algorithm 2). PyTorch's AdamW keeps the number of steps beside them, a scalar for each tensor.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from labkit.memory.storages import storages

#: Numbers of the parameter's own dtype that an optimizer keeps for each trained parameter.
MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}


def state_bytes(module: nn.Module, optimizer: str = "adamw") -> dict[str, int]:
    """Bytes of "parameters", "gradients", "optimizer_state" and "buffers" after a step, each storage counted once.

    `optimizer` is "sgd", "momentum" (SGD with it) or "adamw". Frozen parameters have no gradient and no state, tied
    ones are one parameter. Raises ValueError for another optimizer.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return {
        "parameters": _once(module.parameters()),
        "gradients": _sum(trained),
        "optimizer_state": optimizer_bytes(trained, optimizer),
        "buffers": _once(module.buffers()),
    }


def optimizer_bytes(trained: Iterable[Tensor], optimizer: str) -> int:
    """Bytes of the optimizer's state for these parameters, from its first step on."""
    if optimizer not in MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(MOMENTS)}, not {optimizer!r}.")
    trained = list(trained)
    scalar = torch.finfo(torch.get_default_dtype()).bits // 8  # torch.optim's count of steps is float32, or float64
    return MOMENTS[optimizer] * _sum(trained) + (scalar * len(trained) if optimizer == "adamw" else 0)


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _once(tensors: Iterable[Tensor]) -> int:
    return sum({storage._cdata: storage.nbytes() for storage in storages(list(tensors))}.values())
