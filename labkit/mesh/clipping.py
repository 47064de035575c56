"""`clip_grad_norm_`: the norm of all gradients as one process would see it, whatever each rank holds of them.

Every rank adds up what it is the first to hold, and one number is summed along every axis that something is sharded
over. With nothing sharded, as in data parallel, nothing is sent.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed import ReduceOp

from labkit.mesh.attachment import gradient_of
from labkit.mesh.axes import Axis
from labkit.mesh.counting import axes_to_sum, counts_here, sum_over
from labkit.mesh.placement import Placement

_ROW = 4096  # elements summed in the gradient's own precision; longer sums of float32 drift by 1e-6


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    placements: Mapping[torch.Tensor, Placement] | None = None,
    axes: Iterable[Axis] = (),
) -> torch.Tensor:
    """Scale the gradients in place so that their norm over the whole model is at most `max_norm`; returns the norm
    before, the same number on every rank (float64 if one of this rank's gradients is, else float32).

    As torch.nn.utils.clip_grad_norm_, whose factor min(1, max_norm / (norm + 1e-6)) it uses. Sharded, replicated and
    tied parameters, and one that is given twice, count once. All ranks that hold a part of the model call it together.

    Args:
        parameters: those with `.grad`, or with a Placement that says where the gradient is. Gradients that are None
            count 0.
        max_norm: 0 or more.
        norm_type: a power above 0, or `math.inf` for the largest absolute value.
        error_if_nonfinite: raise RuntimeError, on every rank, where the norm is NaN or infinite.
        foreach: as in PyTorch: whether all gradients are scaled at once; None means on GPUs only.
        placements: Placements of gradients by parameter, which go before those attached (see `labkit.mesh.place`).
        axes: further axes to sum over, for a rank that may hold no parameter at all.
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm is {max_norm!r}; give 0 or more")
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type is {norm_type!r}; give a power above 0, or math.inf")
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    pieces = []
    for parameter in {id(one): one for one in given}.values():
        gradient, placement = gradient_of(parameter)
        placement = (placements or {}).get(parameter, placement)
        pieces.append((gradient, placement))
        if gradient is not None and gradient.layout is not torch.strided:
            raise ValueError("clip_grad_norm_: a gradient is sparse; build its layer with sparse=False")
        if gradient is not None and gradient.numel() != placement.numel:
            raise ValueError(
                f"clip_grad_norm_: a gradient of shape {list(gradient.shape)} for a piece of shape "
                f"{list(placement.local_shape)}, of a parameter of shape {list(placement.shape)}: place its gradient"
            )
    summed = axes_to_sum((placement for _, placement in pieces), more=axes)
    gradients = [gradient.detach() for gradient, _ in pieces if gradient is not None]
    counted = [one.detach() for one, placement in pieces if one is not None and counts_here(placement, summed)]
    norm = _norm(counted, norm_type, summed, _device(gradients, summed))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {norm.item()}; nothing was scaled")
    _scale(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0), foreach)
    return norm.to(torch.float64 if any(one.dtype == torch.float64 for one in gradients) else torch.float32)


def _norm(gradients: Sequence[torch.Tensor], power: float, axes: Sequence[Axis], device: torch.device) -> torch.Tensor:
    """The norm over all ranks, float64 []."""
    largest = math.isinf(power)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        part = _largest(gradient) if largest else _sum_of_powers(gradient, power)
        if largest:
            torch.maximum(total, part.to(device), out=total)
        else:
            total.add_(part.to(device))
    sum_over(axes, total, ReduceOp.MAX if largest else ReduceOp.SUM)
    return total if largest else total.pow(1 / power)


def _largest(gradient: torch.Tensor) -> torch.Tensor:
    if not gradient.numel():
        return torch.zeros((), dtype=torch.float64, device=gradient.device)
    largest: torch.Tensor = torch.linalg.vector_norm(gradient, math.inf)
    return largest.double()


def _sum_of_powers(gradient: torch.Tensor, power: float) -> torch.Tensor:
    """The sum of |x|^power, float64 []: rows in float32 or better, their sum in float64."""
    flat = gradient.reshape(-1)
    dtype = torch.float32 if gradient.dtype.itemsize < 4 else None
    rows = flat.numel() // _ROW
    head, tail = flat[: rows * _ROW].view(rows, _ROW), flat[rows * _ROW :]
    total: torch.Tensor = torch.linalg.vector_norm(tail, power, dtype=dtype).double().pow(power)
    if rows:
        total.add_(torch.linalg.vector_norm(head, power, dim=1, dtype=dtype).double().pow(power).sum())
    return total


def _scale(gradients: Sequence[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[gradient.device, gradient.dtype].append(gradient)
    for (device, _), tensors in alike.items():
        local = factor.to(device)
        if foreach or (foreach is None and device.type == "cuda"):
            torch._foreach_mul_(tensors, local)
        else:
            for tensor in tensors:
                tensor.mul_(local)


def _device(gradients: Sequence[torch.Tensor], axes: Sequence[Axis]) -> torch.device:
    if gradients:
        return gradients[0].device
    on_gpu = any(axis.group is not None and axis.group.name() == "nccl" for axis in axes)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
