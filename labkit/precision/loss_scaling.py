"""`GradScaler`: the loss is multiplied before backward, so that float16 gradients don't underflow, and the gradients
divided before the step; the factor is found while training.

Source: Micikevicius and others, Mixed Precision Training, arXiv:1710.03740, section 3.2; the schedule and the interface
of torch.amp.GradScaler.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from labkit.collectives import all_reduce
from labkit.collectives.calls import operation
from labkit.collectives.groups import endpoint
from labkit.mesh import as_axis
from labkit.mesh.attachment import gradient_of
from labkit.mesh.axes import AxisLike

_Outputs = TypeVar("_Outputs")


@dataclass
class _Turn:
    """Where an optimizer is between two updates."""

    unscaled: bool = False
    stepped: bool = False
    found_inf: bool = False
    has_gradients: bool = False


class GradScaler:
    """Scales losses and steps optimizers; as torch.amp.GradScaler, for which its `state_dict` serves too.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)          # only where gradients are looked at or clipped before the step
        scaler.step(optimizer)              # skipped where a gradient is infinite or NaN
        scaler.update()

    After a skipped step the scale is multiplied by `backoff_factor`, after `growth_interval` clean ones in a row by
    `growth_factor`.

    Args:
        device: "cpu" or "cuda"; kept for PyTorch's signature, gradients may lie anywhere.
        init_scale, growth_factor, backoff_factor, growth_interval: as in torch.amp.GradScaler.
        enabled: False makes `scale` and `unscale_` do nothing and `step` step.
        groups: process groups, axes of a mesh, or None for the world: ranks that must skip together. Each rank's
            finding is agreed over one after the other (control traffic, 4 bytes a message), by every `unscale_`, which
            all their ranks then call alike.

    What is out of order is a RuntimeError, a bad number a ValueError.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        groups: Iterable[AxisLike] = (),
    ) -> None:
        if not isinstance(device, str):
            raise ValueError(f"GradScaler: device is {device!r}; give 'cpu' or 'cuda', and the scale as init_scale")
        self._device, self._enabled = device, enabled
        self._scale, self._growth_tracker = _positive("init_scale", init_scale), 0
        self.set_growth_factor(growth_factor)
        self.set_backoff_factor(backoff_factor)
        self.set_growth_interval(growth_interval)
        self._groups = [as_axis(group) for group in groups] if enabled else []
        self._turns: dict[int, _Turn] = {}
        self._scaled = False

    # --- a step ---

    def scale(self, outputs: _Outputs) -> _Outputs:
        """`outputs` (a tensor, or lists and tuples of them) times the scale."""
        if not self._enabled:
            return outputs
        self._scaled = True
        scaled: _Outputs = self._times_scale(outputs)
        return scaled

    def _times_scale(self, outputs: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            # a tensor, not a number: a 16-bit loss becomes float32, in which 65536 times a loss still fits
            return outputs * torch.full((), self._scale, dtype=torch.float32, device=outputs.device)
        if isinstance(outputs, list | tuple):
            scaled = [self._times_scale(one) for one in outputs]
            return type(outputs)(*scaled) if hasattr(outputs, "_fields") else type(outputs)(scaled)
        raise TypeError(f"GradScaler.scale: got {type(outputs).__name__}; give a tensor, or a list or tuple of tensors")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, in place, and look for inf and NaN.

        Once for each optimizer between two updates, after backward and before clipping. A gradient in float16 is
        refused: divided, it would underflow after all.
        """
        if not self._enabled:
            return
        turn = self._turn(optimizer, "unscale_")
        if turn.stepped:
            raise RuntimeError("GradScaler.unscale_: this optimizer has stepped already; unscale before step()")
        if turn.unscaled:
            raise RuntimeError("GradScaler.unscale_: called twice for this optimizer since the last update()")
        turn.has_gradients, found = _unscale(optimizer, self._inverse())
        turn.found_inf = self._agree(found)
        turn.unscaled = True

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that isn't done, and step the optimizer unless inf or NaN was found.

        Returns what the optimizer's step returns, None if it was skipped; then nothing of the optimizer has changed.
        """
        if "closure" in kwargs or any(callable(one) for one in args):
            raise RuntimeError("GradScaler.step: a closure would compute gradients that are never unscaled: give none")
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        turn = self._turn(optimizer, "step")
        if turn.stepped:
            raise RuntimeError("GradScaler.step: called twice for this optimizer since the last update()")
        if not turn.unscaled:
            self.unscale_(optimizer)
        if not turn.has_gradients and not self._groups:
            raise RuntimeError(
                "GradScaler.step: none of the optimizer's parameters has a gradient; call backward() before"
            )
        turn.stepped = True
        return None if turn.found_inf else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Choose the scale of the next step: once, after all optimizers have stepped. `new_scale` sets it."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = _positive("new_scale", float(new_scale))
        elif not any(turn.unscaled for turn in self._turns.values()):
            raise RuntimeError("GradScaler.update: no optimizer has stepped since the last update(); call step() first")
        elif any(turn.found_inf for turn in self._turns.values()):
            smaller = _float32(self._scale * self._backoff_factor)
            if smaller == 0:
                raise RuntimeError(
                    "GradScaler.update: gradients were infinite or NaN at every scale down to the smallest number: "
                    "look for an infinity or NaN in the inputs, the loss or the weights"
                )
            self._scale, self._growth_tracker = smaller, 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                larger = _float32(self._scale * self._growth_factor)
                self._scale = larger if math.isfinite(larger) else self._scale
                self._growth_tracker = 0
        self._turns, self._scaled = {}, False

    def _turn(self, optimizer: Optimizer, call: str) -> _Turn:
        # where ranks skip together this one may hold no loss, as all stages of a pipeline but the last
        if not self._scaled and not self._groups:
            raise RuntimeError(f"GradScaler.{call}: no loss was scaled since the last update(); backward scale(loss)")
        return self._turns.setdefault(id(optimizer), _Turn())

    def _inverse(self) -> float:
        return _float32(1.0 / self._scale)

    def _agree(self, found: bool) -> bool:
        for axis in self._groups:
            end = endpoint(axis.group)
            device = torch.device("cuda", torch.cuda.current_device()) if end.nccl else torch.device("cpu")
            flag = torch.full((1,), float(found), device=device)
            with operation("found_inf", end, control=True):
                all_reduce(flag, ReduceOp.MAX, axis.group, algorithm="naive")
            found = bool(flag.item())
        return found

    # --- settings and state ---

    def found_inf(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's gradients were found infinite or NaN since the last update: its step is skipped."""
        turn = self._turns.get(id(optimizer))
        return turn is not None and turn.found_inf

    def get_scale(self) -> float:
        """The scale, 1.0 if not enabled."""
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """By what the scale grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set it; above 1."""
        if not (math.isfinite(new_factor) and new_factor > 1):
            raise ValueError(f"GradScaler: growth_factor is {new_factor!r}; give a number above 1")
        self._growth_factor = float(new_factor)

    def get_backoff_factor(self) -> float:
        """By what the scale shrinks."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set it; between 0 and 1."""
        if not 0 < new_factor < 1:
            raise ValueError(f"GradScaler: backoff_factor is {new_factor!r}; give a number between 0 and 1")
        self._backoff_factor = float(new_factor)

    def get_growth_interval(self) -> int:
        """After how many clean steps in a row the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set it; 1 or more."""
        if int(new_interval) != new_interval or new_interval < 1:
            raise ValueError(
                f"GradScaler: growth_interval is {new_interval!r}; give a whole number of steps, 1 or more"
            )
        self._growth_interval = int(new_interval)

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The scale, the count of clean steps and the settings, under PyTorch's names; empty if not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, ours or PyTorch's; nothing happens if not enabled."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("GradScaler: the state is empty, as that of a scaler with enabled=False is: keep it out")
        missing = [name for name in self.state_dict() if name not in state_dict]
        if missing:
            raise RuntimeError(
                f"GradScaler: the state has no {missing[0]!r}; give what a scaler's state_dict() returned"
            )
        self._scale = _positive("scale", state_dict["scale"])
        self.set_growth_factor(state_dict["growth_factor"])
        self.set_backoff_factor(state_dict["backoff_factor"])
        self.set_growth_interval(state_dict["growth_interval"])
        self._growth_tracker = int(state_dict["_growth_tracker"])


def _unscale(optimizer: Optimizer, inverse: float) -> tuple[bool, bool]:
    """Multiply all gradients of the optimizer; returns whether there are any, and one was infinite or NaN before."""
    fetch: Callable[[], None] | None = getattr(optimizer, "fetch_gradients", None)
    if fetch is not None:  # master weights: the gradients are in the 16-bit parameters still
        fetch()
    # through the placements, since ZeRO keeps its pieces elsewhere than in .grad
    pieces = [gradient_of(one)[0] for group in optimizer.param_groups for one in group["params"]]
    gradients = [piece for piece in pieces if piece is not None]
    if any(gradient.dtype is torch.float16 for gradient in gradients):
        raise ValueError(
            "GradScaler: a gradient is float16 and would underflow; keep float32 parameters under autocast"
        )
    found = False
    with torch.no_grad():
        for gradient in gradients:
            values = gradient._values() if gradient.is_sparse else gradient
            found = found or not all_finite(values)
            values.mul_(inverse)
    return bool(gradients), found


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element is infinite or NaN. In one pass without a copy: both survive minimum and maximum."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32).item())


def _positive(name: str, number: float) -> float:
    value = _float32(number) if isinstance(number, int | float) else math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"GradScaler: {name} is {number!r}; give a number above 0 that float32 can hold")
    return value
