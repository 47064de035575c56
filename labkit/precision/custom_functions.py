"""Custom autograd functions under autocast: forward in a dtype of its own choice, backward in forward's state."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from labkit.precision.autocasting import autocast
from labkit.precision.casts import eligible, map_tensors
from labkit.precision.regions import autocast_state

Function = Callable[..., Any]


def custom_fwd(fwd: Function | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorates the `forward` of a torch.autograd.Function (below @staticmethod), as torch.amp.custom_fwd.

    Without `cast_inputs` forward runs in the autocast state it is called in. With it, inside of an autocast region,
    floating-point inputs (but float64) are cast to that dtype and forward runs with autocast off.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    forward = fwd

    @functools.wraps(forward)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        state = autocast_state()
        region = state.of(device_type)
        if cast_inputs is None or region is None or not region.enabled:
            ctx._autocast_state = state
            return forward(ctx, *args, **kwargs)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(cast_inputs) if eligible(tensor, device_type) else tensor

        with autocast(device_type, enabled=False):
            ctx._autocast_state = autocast_state()
            return forward(ctx, *map_tensors(args, cast), **map_tensors(kwargs, cast))

    return decorated


def custom_bwd(bwd: Function | None = None, *, device_type: str) -> Any:
    """Decorates the `backward` beside a `forward` decorated by `custom_fwd`: it runs in forward's autocast state."""
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    backward = bwd

    @functools.wraps(backward)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(ctx, "_autocast_state", None)
        if state is None:
            raise RuntimeError("custom_bwd: the function's forward is not decorated; put @custom_fwd on it")
        with state.restore():
            return backward(ctx, *args, **kwargs)

    return decorated
