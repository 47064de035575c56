"""BatchNorm under micro-batches: normalise each by its own statistics, keep the running ones by the whole batch's.

GPipe's rule (Huang and others, arXiv:1811.06965, section 2.2): in training the statistics of each micro-batch are used;
the averages for evaluation are taken over the mini-batch. So they are updated once a step, from sums over all its
micro-batches, and don't depend on their number.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Sums:
    """What one layer has seen in a step, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor | None = None
        self.squares: Tensor | None = None

    def add(self, x: Tensor) -> None:
        with torch.no_grad():
            flat = x.detach().transpose(0, 1).flatten(1).double()  # [features, values of each]
            self.count += flat.shape[1]
            total, squares = flat.sum(1), flat.square().sum(1)
            self.total = total if self.total is None else self.total + total
            self.squares = squares if self.squares is None else self.squares + squares


class DeferredStatistics:
    """Holds back the running statistics of a module's BatchNorm layers while a step runs, and updates them at its end.

    Layers in evaluation mode, without running statistics, or normalising over all ranks are left alone. A forward that
    is computed again in backward, by checkpointing, does not count.
    """

    def __init__(self, module: nn.Module) -> None:
        self.layers = [one for one in module.modules() if isinstance(one, _BatchNorm)]
        self.counting = False
        self.sums: dict[_BatchNorm, _Sums] = {}
        self.momenta: dict[_BatchNorm, tuple[float | None, Tensor | None]] = {}
        for layer in self.layers:
            layer.register_forward_pre_hook(self._see)

    def begin(self) -> None:
        """Hold the running statistics back."""
        self.sums.clear()
        self.momenta.clear()
        for layer in self.layers:
            if layer.training and layer.running_mean is not None:
                tracked = layer.num_batches_tracked
                self.momenta[layer] = layer.momentum, None if tracked is None else tracked.clone()
                layer.momentum = 0.0  # batch statistics are used, running ones stay

    def end(self) -> None:
        """Update them, once."""
        for layer, (momentum, tracked) in self.momenta.items():
            layer.momentum = momentum
            if tracked is not None and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(tracked)
            seen = self.sums.get(layer)
            if seen is not None and seen.count:
                _update(layer, seen)
        self.momenta.clear()

    def _see(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.counting and layer in self.momenta:
            assert isinstance(layer, _BatchNorm)
            self.sums.setdefault(layer, _Sums()).add(args[0])


def _update(layer: _BatchNorm, seen: _Sums) -> None:
    """As PyTorch's BatchNorm after one batch: biased variance for normalising, unbiased for the average."""
    assert seen.total is not None and seen.squares is not None
    assert layer.running_mean is not None and layer.running_var is not None
    mean = seen.total / seen.count
    var = (seen.squares / seen.count - mean.square()).clamp(min=0) * (seen.count / max(1, seen.count - 1))
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    factor = layer.momentum
    if factor is None:
        factor = 1.0 / float(layer.num_batches_tracked if layer.num_batches_tracked is not None else 1)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(var.to(layer.running_var.dtype), factor)
