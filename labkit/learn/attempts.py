"""One attempt in a rank: the learner's function runs once, watched, and what was seen of it is returned.

A clock that needs no cooperation ends the process when time is up, so that no loop, and no C code, runs for ever.
"""

import copy
import faulthandler
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.learn.bounded_output import BoundedOutput
from labkit.learn.exercises import Trial
from labkit.learn.observations import Observation
from labkit.learn.untouched import raised_by_statement
from labkit.record import Recorder


class NotTriedYet(Exception):
    """The learner's function is the stub that the lesson gave."""


def attempt(function: Callable[..., Any], trial: Trial, seconds: float, folder: str) -> Observation:
    """Run `trial` of `function` in this rank. After `seconds` the process ends, its stacks written into `folder`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = trial.inputs(rank, world_size)
    before = copy.deepcopy(inputs)
    with open(Path(folder) / f"stacks-{rank}", "w") as stacks:
        faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
        try:
            with BoundedOutput(), Recorder() as record:
                value = trial.drive(function, *inputs)
        except NotImplementedError as error:
            if raised_by_statement(error.__traceback__):
                raise NotTriedYet from None
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
    changed = tuple(i for i, (old, new) in enumerate(zip(before, inputs, strict=True)) if not same(old, new))
    return Observation(rank, value, record.ranks[0], changed)


def same(one: Any, other: Any) -> bool:
    """Whether two inputs hold the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.is_floating_point():
            one, other = one.detach().nan_to_num(), other.detach().nan_to_num()
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, torch.nn.Module):
        return isinstance(other, torch.nn.Module) and same(dict(one.state_dict()), dict(other.state_dict()))
    try:
        return bool(one == other) or "__eq__" not in vars(type(one))
    except Exception:
        return True  # what can't be compared is not held against the learner
