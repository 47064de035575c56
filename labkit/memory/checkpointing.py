"""Gradient checkpointing: keep what goes into a function, compute again in backward what was needed within.

Source: T. Chen, B. Xu, C. Zhang and C. Guestrin, Training Deep Nets with Sublinear Memory Cost (2016),
arXiv:1604.06174.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from labkit.memory.kept_arguments import KeptCall
from labkit.memory.recomputing_function import recompute_as_function
from labkit.memory.recomputing_hooks import Contexts, Run, no_contexts
from labkit.memory.surroundings import Surroundings


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    context_fn: Contexts = no_contexts,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """What `function(*args, **kwargs)` returns, without holding for backward what autograd would save within.

    Held are the tensors among the arguments, in lists, tuples and dicts too. Backward runs the function again, with
    the random states (the CPU's, of the devices of the arguments, and of generators among them), the autocast
    (`torch.autocast` and `labkit.precision.autocast`) and the buffers of modules as they were, and leaves these as they
    are now: dropout draws the same mask, and BatchNorm counts a batch once. (With `torch.utils.checkpoint` it counts it
    twice.) Gradients are those of a plain call to the last bit. Checkpoints may be nested.

    The function must do the same each time. Where it saves tensors of other shapes, dtypes or devices, CheckpointError
    names the operation. A parameter or an argument that was changed in between is an error too.

    Args:
        use_reentrant: as an autograd function in place of saved-tensor hooks: see `labkit.memory.recomputing_function`
            for what it can't do.
        preserve_rng_state: False leaves the random states alone, for functions that draw nothing.
        determinism_check: "default", or "none" for no comparison with forward.
        context_fn: returns two contexts, one for forward and one for recomputations, such as
            `create_selective_checkpoint_contexts`.
        early_stop: end a recomputation at the last tensor that is needed.
    """
    if determinism_check not in ("default", "none"):
        raise ValueError(f"determinism_check must be 'default' or 'none', not {determinism_check!r}.")
    if not callable(function):
        raise TypeError(f"checkpoint needs a function and its arguments, not a {type(function).__name__}.")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if use_reentrant:
        if context_fn is not no_contexts:
            raise ValueError("context_fn needs saved-tensor hooks: pass use_reentrant=False.")
        return recompute_as_function(function, args, kwargs, preserve_rng_state=preserve_rng_state)
    leaves, spec = tree_flatten((args, kwargs))
    surroundings = Surroundings(leaves, preserve_rng_state=preserve_rng_state)
    call = KeptCall(function, leaves, spec)
    run = Run(call, surroundings, context_fn, early_stop=early_stop, checks=determinism_check == "default")
    return run.forward(*args, **kwargs)


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `functions` in turn, in `segments` parts of equal length, all but the last checkpointed.

    The last part takes what is left over by the division and is held as ever: its backward comes first. Further
    keyword arguments are those of `checkpoint`. ValueError where there are fewer functions than segments.
    """
    parts = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= len(parts):
        raise ValueError(f"segments must be 1 to {len(parts)}, the number of functions, not {segments}.")
    length = len(parts) // segments
    for number in range(segments - 1):
        part = in_turn(parts[number * length : (number + 1) * length])
        input = checkpoint(part, input, use_reentrant=use_reentrant, **kwargs)
    return in_turn(parts[(segments - 1) * length :])(input)


def in_turn(functions: Sequence[Callable[..., Any]]) -> Callable[[Any], Any]:
    """One function that applies all of them."""

    def run(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return run
