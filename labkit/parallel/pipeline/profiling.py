"""What each step of a sequence costs: seconds of forward and backward, parameters, and bytes that it passes on."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StepProfile:
    """One step: medians of its seconds, its number of parameters, bytes of its output."""

    name: str
    forward: float
    backward: float
    parameters: int
    output_bytes: int

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


def profile_steps(steps: Sequence[nn.Module], example: Any, *, repeats: int = 5) -> list[StepProfile]:
    """Run the steps one after the other on `example`, one micro-batch, forward and backward, and take the time of each.

    Gradients and BatchNorm's statistics are afterwards what they were. The first repeat is not counted.
    """
    buffers = [(buffer, buffer.detach().clone()) for step in steps for buffer in step.buffers()]
    grads = [(parameter, parameter.grad) for step in steps for parameter in step.parameters()]
    times: list[list[tuple[float, float]]] = [[] for _ in steps]
    sizes = [0] * len(steps)
    try:
        with torch.random.fork_rng(devices=[]):
            for _ in range(repeats + 1):
                value = example
                for number, step in enumerate(steps):
                    value = _detached(value)
                    begin = time.perf_counter()
                    output = step(value)
                    middle = time.perf_counter()
                    parts = [one for one in _tensors(output) if one.requires_grad]
                    torch.autograd.backward(parts, [torch.ones_like(one) for one in parts])
                    times[number].append((middle - begin, time.perf_counter() - middle))
                    sizes[number] = sum(one.numel() * one.element_size() for one in _tensors(output))
                    value = output
    finally:
        for buffer, before in buffers:
            buffer.detach().copy_(before)
        for parameter, grad in grads:
            parameter.grad = grad
    return [
        StepProfile(
            name=f"{number} {type(getattr(step, 'module', step)).__name__}",
            forward=statistics.median(one for one, _ in seconds[1:]),
            backward=statistics.median(other for _, other in seconds[1:]),
            parameters=sum(parameter.numel() for parameter in step.parameters()),
            output_bytes=size,
        )
        for number, (step, seconds, size) in enumerate(zip(steps, times, sizes, strict=True))
    ]


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for one in value if isinstance(one, Tensor)]


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        leaf = value.detach()
        return leaf.requires_grad_() if leaf.is_floating_point() else leaf
    return type(value)(_detached(one) for one in value)
