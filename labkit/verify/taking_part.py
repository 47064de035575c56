"""A rank's side of the harness: build, parallelize, train a few steps, and hand over what came out."""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.collectives import all_reduce
from labkit.verify.courses import KINDS, Course, Loss, Named, Task, aliases_of, default_dtype, made, mask_seed
from labkit.verify.truth import shards_of

Parallelize = Callable[[nn.Module, Loss, Callable[[Any], Optimizer]], Any]


@runtime_checkable
class Stepper(Protocol):
    """What `parallelize` may return: it takes the whole batch, and shows full gradients and parameters by name."""

    def step(self, inputs: Any, targets: Any) -> Any: ...

    def full_grads(self) -> Named: ...

    def full_params(self) -> Named: ...


class Wrapped:
    """A wrapped module as a stepper: the harness takes this rank's share, weighs the loss and steps.

    The rule for losses: a rank's loss sum is divided by the step's global weight (one small counted all-reduce) and
    multiplied by the number of ranks, by which wrappers divide.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, task: Task) -> None:
        self.module, self.optimizer, self.task = module, optimizer, task
        self.share = shards_of(task)[dist.get_rank()]

    def step(self, inputs: Any, targets: Any) -> None:
        self.optimizer.zero_grad()
        total, weight = self.task.loss(self.module(self.share[0]), self.share[1])
        everyones = torch.tensor(float(weight), dtype=torch.float64)
        all_reduce(everyones)
        (total * (dist.get_world_size() / everyones.item())).backward()
        self.optimizer.step()

    def full_grads(self) -> Named:
        own = getattr(self.module, "full_grads", None)
        if own is not None:
            return cast(Named, cast(Any, own)())
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}

    def full_params(self) -> Named:
        own = getattr(self.module, "full_params", None)
        if own is not None:
            return cast(Named, cast(Any, own)())
        return dict(self.module.named_parameters())

    def full_buffers(self) -> Named:
        return dict(self.module.named_buffers())


#: what this rank has to hand over
_held: dict[str, Named | None] = {}


def take_part(task: Task, parallelize: Parallelize, start: str) -> dict[str, str]:
    """Train the course on this rank. Returns a digest of each kind of result; `hand_over` gives the results."""
    rank = dist.get_rank()
    with default_dtype(task.dtype):
        module = made(task.build, task.dtype, task.seed + (rank if start == "rank0" else 0))
        if start == "rank0" and rank > 0:
            _spoil_buffers(module, rank)
        aliases, buffers = aliases_of(module), {name: name for name, _ in module.named_buffers()}
        stepper = _stepper(parallelize(module, task.loss, task.optimizer), task)
        show_buffers = getattr(stepper, "full_buffers", None)

        def shown_buffers() -> Named | None:
            return None if show_buffers is None else _copies(show_buffers(), buffers)

        weights, start_buffers = _copies(stepper.full_params(), aliases), shown_buffers()
        shown: list[tuple[Named, Named]] = []
        for step in range(task.steps):
            torch.manual_seed(mask_seed(task.seed, step, rank))
            stepper.step(task.inputs, task.targets)
            if step in (0, task.steps - 1):
                shown.append((_copies(stepper.full_grads(), aliases), _copies(stepper.full_params(), aliases)))
        course = Course(weights, start_buffers, *shown[0], *shown[-1], shown_buffers())
    _held.clear()
    _held.update({kind: getattr(course, kind) for kind in KINDS})
    return {kind: _digest(value) for kind, value in _held.items()}


def hand_over(wanted: dict[str, set[int]]) -> dict[str, Named | None]:
    """The results of this rank that are wanted of it."""
    rank = dist.get_rank()
    return {kind: value for kind, value in _held.items() if rank in wanted[kind]}


def forget() -> None:
    """Free what is held."""
    _held.clear()


def _stepper(given: Any, task: Task) -> Any:
    if isinstance(given, Stepper):
        return given
    module, optimizer = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(module, nn.Module):
        raise TypeError(
            "assert_equivalent: parallelize() must return a wrapped module, a pair (module, optimizer), or an object "
            f"with step, full_grads and full_params; it returned a {type(given).__name__}"
        )
    if task.micro_batches > 1:
        raise ValueError(
            "assert_equivalent: a wrapped module is given its share in one piece: for micro_batches="
            f"{task.micro_batches} let parallelize() return an object whose step() cuts the share"
        )
    return Wrapped(module, optimizer or task.optimizer(module.parameters()), task)


def _copies(values: Named, aliases: dict[str, str]) -> Named:
    """Copies on the CPU, by the original name: a tied parameter's first, without a wrapper's "module."."""
    result = Named()
    for name, value in values.items():
        original = name
        while original not in aliases and original.startswith("module."):
            original = original.removeprefix("module.")
        result[aliases.get(original, name)] = None if value is None else value.detach().cpu().clone()
    return result


def _spoil_buffers(module: nn.Module, rank: int) -> None:
    """Other buffers than rank 0's, so that one who forgets to broadcast them is seen."""
    for buffer in module.buffers():
        buffer.detach().add_(rank if not buffer.is_floating_point() else 0.125 * rank)


def _digest(values: Named | None) -> str:
    """Equal for equal bits under equal names."""
    digest = hashlib.sha256()
    for name, value in sorted((values or {}).items()):
        digest.update(f"{name} {'None' if value is None else (value.dtype, tuple(value.shape))}".encode())
        if isinstance(value, Tensor) and value.numel():
            digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
