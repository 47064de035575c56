"""`SyncBatchNorm`: batch normalisation whose mean and variance are those of the whole batch, over all ranks.

Plain BatchNorm under data parallel normalises each share by its own statistics, so the result depends on how the
batch was split. Sources: S. Ioffe and C. Szegedy, Batch Normalization (2015), algorithm 1 and section 3 for the
gradient; T. Chan, G. Golub, R. LeVeque, Updating formulae (1979), equation 2.1, for joining the shares' statistics.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from labkit.collectives import ReduceOp, all_gather_into_tensor, all_reduce
from labkit.collectives.groups import Group, endpoint


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """As torch.nn.SyncBatchNorm, on CPUs too: one all-gather of 2 C + 1 numbers forward, one all-reduce of 2 C numbers
    backward. Input [B, C, ...]; B may differ from rank to rank and be 0 on some."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Group = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: the input has {input.dim()} dims; give [B, C] or more")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalised input, of the same shape."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None):
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        mean, variance, count = _global_statistics(input.detach(), self.process_group)
        if self.training and self.running_mean is not None:
            self._track(mean, variance, count)
        return _Normalise.apply(  # type: ignore[no-any-return]
            input, self.weight, self.bias, mean, torch.rsqrt(variance + self.eps), count, self.process_group
        )

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(1, count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Group = None) -> nn.Module:
        """The module with every BatchNorm in it replaced; parameters and statistics are the same tensors."""
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            new = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            new._parameters, new._buffers, new.training = module._parameters, module._buffers, module.training
            return new
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module


def _global_statistics(input: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean [C] and biased variance [C] over all ranks' inputs [B, C, ...], and how many values each is of."""
    channels, dims = input.shape[1], [dim for dim in range(input.dim()) if dim != 1]
    count = input.numel() // channels
    mean = input.mean(dims) if count else input.new_zeros(channels)
    spread = (input - _shaped(mean, input)).square().sum(dims)
    mine = torch.cat([mean, spread, mean.new_tensor([count])])
    everyone = mine.new_empty(endpoint(group).size, len(mine))
    all_gather_into_tensor(everyone, mine, group)
    means, spreads, counts = everyone[:, :channels], everyone[:, channels:-1], everyone[:, -1:]
    total = counts.sum()
    joint = (means * counts).sum(0) / total
    variance = (spreads.sum(0) + (counts * (means - joint).square()).sum(0)) / total
    return joint, variance, int(total)


def _shaped(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[C] as [1, C, 1, ...]."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / std * weight + bias, whose gradient knows that mean and std depend on every rank's x."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse_std: torch.Tensor,
        count: int,
        group: Group,
    ) -> torch.Tensor:
        normal = (input - _shaped(mean, input)) * _shaped(inverse_std, input)
        ctx.save_for_backward(normal, weight, inverse_std)
        ctx.count, ctx.group, ctx.affine = count, group, weight is not None
        return normal if weight is None or bias is None else normal * _shaped(weight, input) + _shaped(bias, input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        normal, weight, inverse_std = ctx.saved_tensors
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        grad_bias, grad_weight = gradient.sum(dims), (gradient * normal).sum(dims)
        # over all ranks: the sums by which mean and variance answer for every value
        sums = torch.cat([grad_bias, grad_weight])
        all_reduce(sums, ReduceOp.SUM, ctx.group)
        sum_bias, sum_weight = (sums / ctx.count).split(len(grad_bias))
        scale = inverse_std if weight is None else inverse_std * weight
        inner = gradient - _shaped(sum_bias, gradient) - normal * _shaped(sum_weight, gradient)
        grad_input = inner * _shaped(scale, gradient)
        return grad_input, *((grad_weight, grad_bias) if ctx.affine else (None, None)), None, None, None, None
