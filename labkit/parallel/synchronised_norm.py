"""`SyncBatchNorm`: batch normalisation whose mean and variance are those of the whole batch, over all ranks.

Plain BatchNorm under data parallel normalises each share by its own statistics, so the result depends on how the
batch was split. Sources: S. Ioffe and C. Szegedy, Batch Normalization (2015), algorithm 1 and section 3 for the
gradient; T. Chan, G. Golub, R. LeVeque, Updating formulae (1979), equation 2.1, for joining the shares' statistics.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from labkit.collectives import ReduceOp, all_gather_into_tensor, all_reduce
from labkit.collectives.groups import Group, endpoint
from labkit.models.norms import register_norm


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """As torch.nn.SyncBatchNorm, on CPUs too: one all-gather of 2 C + 1 numbers forward, one all-reduce of 2 C numbers
    backward, both in float64 for inputs of any dtype. Input [B, C, ...]; B may differ from rank to rank and be 0 on
    some. Outside of ranks it is BatchNorm.

    Raises ValueError where all ranks together have less than two values a channel, which have no variance.
    """

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
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: the input is {list(input.shape)}; give [B, {self.num_features}, ...], its channels "
                "in dim 1"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalised input, of the same shape and dtype."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None):
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        mean, variance, count = _global_statistics(input.detach(), self.process_group)
        if self.training and self.running_mean is not None:
            self._track(mean, variance, count)
        inverse_std = torch.rsqrt(variance + self.eps)
        # 16-bit inputs are normalised in float32
        wide = torch.promote_types(input.dtype, torch.float32)
        return _Normalise.apply(  # type: ignore[no-any-return]
            input, self.weight, self.bias, mean.to(wide), inverse_std.to(wide), count, self.process_group
        )

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        # the running variance is the unbiased one
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), factor)

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
    """Mean [C] and biased variance [C] over all ranks' inputs [B, C, ...] in float64, and of how many values each."""
    channels, dims = input.shape[1], _other_dims(input)
    count = input.numel() // channels
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    mean = wide.mean(dims) if count else wide.new_zeros(channels)
    spread = (wide - _shaped(mean, input)).square().sum(dims)
    mine = torch.cat([mean, spread, mean.new_tensor([count])]).double()
    mine[-1] = count  # exact, where float32 would round it
    size = endpoint(group).size if torch.distributed.is_initialized() else 1
    everyone = mine.new_empty(size, len(mine))
    if size > 1:
        all_gather_into_tensor(everyone, mine, group)
    else:
        everyone.copy_(mine)
    means, spreads, counts = everyone[:, :channels], everyone[:, channels:-1], everyone[:, -1:]
    total = int(counts.sum())
    if total < 2:
        raise ValueError(f"SyncBatchNorm: {total} value a channel over all ranks has no variance; give 2 or more")
    joint = (means * counts).sum(0) / total
    variance = (spreads.sum(0) + (counts * (means - joint).square()).sum(0)) / total
    return joint, variance, total


def _other_dims(tensor: torch.Tensor) -> list[int]:
    """All dims but the channels'."""
    return [dim for dim in range(tensor.dim()) if dim != 1]


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
        ctx.save_for_backward(input, weight, mean, inverse_std)
        ctx.count, ctx.group = count, group
        output = (input - _shaped(mean, input)) * _shaped(inverse_std, input)
        if weight is not None and bias is not None:
            output = output * _shaped(weight, input) + _shaped(bias, input)
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, mean, inverse_std = ctx.saved_tensors
        wide, dims = gradient.to(mean.dtype), _other_dims(gradient)
        normal = (input - _shaped(mean, input)) * _shaped(inverse_std, input)
        grad_bias, grad_weight = wide.sum(dims), (wide * normal).sum(dims)
        # over all ranks: the sums by which mean and variance answer for every value
        sums = torch.cat([grad_bias, grad_weight]).double()
        if torch.distributed.is_initialized():
            all_reduce(sums, ReduceOp.SUM, ctx.group)
        sum_bias, sum_weight = (sums / ctx.count).to(wide.dtype).split(len(grad_bias))
        scale = inverse_std if weight is None else inverse_std * weight
        inner = wide - _shaped(sum_bias, gradient) - normal * _shaped(sum_weight, gradient)
        grad_input = (inner * _shaped(scale, gradient)).to(gradient.dtype)
        affine = (None, None) if weight is None else (grad_weight.to(weight.dtype), grad_bias.to(weight.dtype))
        return grad_input, *affine, None, None, None, None


register_norm("sync", SyncBatchNorm)
