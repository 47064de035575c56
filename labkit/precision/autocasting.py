"""`autocast`: a region in which products run in 16 bits and what needs it in float32, whatever the model's dtype.

Source: Micikevicius and others, Mixed Precision Training, ICLR 2018, arXiv:1710.03740; the rules of PyTorch's
torch.autocast, operation by operation.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from labkit.precision.cast_lists import LISTS
from labkit.precision.processors import native
from labkit.precision.regions import AutocastState, Region, autocast_state, entered

_F = TypeVar("_F", bound=Callable[..., Any])
_DEFAULTS = {"cpu": torch.bfloat16, "cuda": torch.float16}


class autocast:
    """A context manager and decorator; as torch.autocast, and made of a torch-function mode.

    Inside, products and convolutions run in `dtype`, losses and some others in float32, joins in the widest dtype of
    their inputs (see `labkit.precision.cast_lists`; the lists of "cpu" and "cuda" differ). Weights stay float32, and so
    do their gradients. Run forward and loss inside, backward outside. Regions nest; `enabled=False` makes a hole.

    float16 on a CPU: most processors have no instructions for it, and PyTorch's replacement takes many times float32's
    time. There the products are emulated: inputs, output and gradients are rounded to float16, the product is computed
    in float32, as a GPU's tensor cores sum in float32. Dtypes are those of real float16; what the product keeps for
    backward is held in float32, so that memory is not saved.

    Args:
        device_type: "cpu" or "cuda". Tensors elsewhere are left alone, and so is float64.
        dtype: torch.bfloat16 or torch.float16; bfloat16 on the CPU and float16 on a GPU if not given.
        enabled: whether anything is cast.
        cache_enabled: keep the 16-bit copies of weights until the outermost region ends; as outside if not given.
        emulate: float16 by rounding; if not given, where the CPU doesn't multiply float16 itself.

    A device type or dtype that can't be is a ValueError, "cuda" without a GPU a RuntimeError.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        emulate: bool | None = None,
    ) -> None:
        if device_type not in LISTS:
            raise ValueError(f"autocast: device_type is {device_type!r}; give 'cpu' or 'cuda'")
        dtype = _DEFAULTS[device_type] if dtype is None else dtype
        if enabled and dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"autocast: dtype is {dtype}; give torch.bfloat16 or torch.float16, or enabled=False")
        if enabled and device_type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("autocast: this machine has no CUDA GPU; give device_type='cpu', or enabled=False")
        may_emulate = device_type == "cpu" and dtype is torch.float16
        if emulate and not may_emulate:
            raise ValueError("autocast: only float16 on the CPU is emulated; leave emulate out")
        self.device, self.fast_dtype = device_type, dtype
        self.emulates = may_emulate and (not native(dtype) if emulate is None else emulate)
        self._enabled, self._cache_enabled = enabled, cache_enabled
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> "autocast":
        outside = autocast_state()
        around = outside.of(self.device)
        caches = self._cache_enabled
        if caches is None:
            caches = True if around is None else around.caches
        region = Region(self.device, self.fast_dtype, self._enabled, caches, self.emulates)
        others = tuple(one for one in outside.regions if one.device_type != self.device)
        block = entered(AutocastState((region, *others)))
        block.__enter__()
        self._entered.append(block)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    def _twin(self) -> "autocast":
        twin = copy.copy(self)
        twin._entered = []
        return twin

    def __call__(self, function: _F) -> _F:
        """`function`, run inside of such a region."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self._twin():  # of each call its own: several threads may be in the function
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]
