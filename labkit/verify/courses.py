"""A course: a few training steps as one process sees them, everything by the parameter's original name."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Named: TypeAlias = dict[str, Tensor | None]
Build: TypeAlias = Callable[[], nn.Module]
Loss: TypeAlias = Callable[[Any, Any], tuple[Tensor, Any]]
MakeOptimizer: TypeAlias = Callable[[Any], Optimizer]


@dataclass
class Course:
    """What a course of `steps` steps was: where it started, the first step, and the end."""

    start: Named
    start_buffers: Named | None  # None where buffers are not shown
    first_gradients: Named
    first_weights: Named
    gradients: Named
    weights: Named
    buffers: Named | None


KINDS = tuple(field.name for field in fields(Course))
WORDS = {
    "start": "the starting weights",
    "start_buffers": "the starting buffers",
    "first_gradients": "the gradients of step 1",
    "first_weights": "the weights after step 1",
    "gradients": "the gradients of step {steps}",
    "weights": "the weights after step {steps}",
    "buffers": "the buffers after step {steps}",
}


@dataclass(frozen=True)
class Task:
    """All that both sides, the truth and the ranks, are given. `shares` are the rows of each rank."""

    build: Build
    inputs: Any
    targets: Any
    loss: Loss
    optimizer: MakeOptimizer
    shares: Sequence[int]
    micro_batches: int
    steps: int
    dtype: torch.dtype
    seed: int

    @property
    def world_size(self) -> int:
        return len(self.shares)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors are of `dtype` inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made(build: Build, dtype: torch.dtype, seed: int) -> nn.Module:
    """The module that `build` gives for `seed`. Where all of it is of one other floating-point dtype (a copy of a
    finished module, say) it is converted; a module of mixed dtypes stays as it is."""
    torch.manual_seed(seed)
    given: Any = build()
    if not isinstance(given, nn.Module):
        raise TypeError(f"assert_equivalent: build() must return an nn.Module, not a {type(given).__name__}")
    module = copy.deepcopy(given)  # build may hand out one and the same
    kinds = {tensor.dtype for tensor in module.state_dict().values() if tensor.is_floating_point()}
    return module.to(dtype) if len(kinds) == 1 else module


def mask_seed(seed: int, step: int, rank: int) -> int:
    """The seed of a rank's random numbers in a step: what draws a dropout mask again."""
    return seed + 1_000_003 * (step + 1) + 7919 * rank


def weights_of(module: nn.Module) -> Named:
    """Copies of all parameters; a tied one comes once, under its first name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def gradients_of(module: nn.Module) -> Named:
    """Copies of all gradients, None where there is none."""
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: None if grad is None else grad.detach().clone() for name, grad in grads.items()}


def buffers_of(module: nn.Module) -> Named:
    """Copies of all buffers."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def load_buffers(module: nn.Module, buffers: Named) -> None:
    """Put the values back, in place."""
    for name, buffer in module.named_buffers():
        value = buffers[name]
        if value is not None:
            buffer.detach().copy_(value)


def aliases_of(module: nn.Module) -> dict[str, str]:
    """For every name of a parameter, tied ones included, the one that it goes by here."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}
