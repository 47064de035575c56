"""`MasterWeights`: 16-bit parameters compute, float32 copies of them are what the optimizer steps.

An update smaller than half the distance to the next 16-bit number is lost when it is added to a 16-bit weight. The
float32 copy keeps it, until a few of them add up to a step that 16 bits can show.

Source: Micikevicius and others, Mixed Precision Training, arXiv:1710.03740, section 3.1.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer


class MasterWeights(Optimizer):
    """An optimizer over float32 copies of 16-bit parameters.

    `param_groups` hold the float32 masters (clip their gradients, and let GradScaler unscale them), `zero_grad` frees
    the gradients of both. It costs 4 bytes a parameter, and in `step` another 4 for gradients in float32.

    Args:
        params: bfloat16 or float16 parameters, or groups of them as for any optimizer; float32 ones are stepped as
            they are.
        optimizer_class: the class of the optimizer inside.
        defaults: its settings.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        **defaults: Any,
    ) -> None:
        given: list[Any] = list(params)
        groups = [dict(group) if isinstance(group, dict) else {"params": [group]} for group in given]
        if all(not isinstance(group, dict) for group in given):
            groups = [{"params": given}]
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.optimizer = optimizer_class([self._with_masters(group) for group in groups], **defaults)
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; those in 16 bits get masters."""
        if any(
            param_group is one for one in self.optimizer.param_groups
        ):  # the groups of the optimizer inside, which has made them
            super().add_param_group(param_group)
        else:
            self.optimizer.add_param_group(self._with_masters(param_group))

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._master(parameter) for parameter in _listed(group["params"])]}

    def _master(self, parameter: Any) -> torch.Tensor:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"MasterWeights: got a {type(parameter).__name__} among the parameters; give tensors, such as "
                "module.parameters()"
            )
        if any(parameter is one for one, _ in self._pairs):
            raise ValueError(
                f"MasterWeights: a parameter of shape {list(parameter.shape)} is given twice; give it once"
            )
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        master = Parameter(parameter.detach().to(torch.float32))
        self._pairs.append((parameter, master))
        return master

    @property
    def masters(self) -> list[torch.Tensor]:
        """The float32 copies, in the order of the parameters that have one."""
        return [master for _, master in self._pairs]

    @torch.no_grad()
    def fetch_gradients(self) -> None:
        """Move the gradients of the 16-bit parameters into the masters' `.grad`, added where there is one.

        `step` and GradScaler's `unscale_` do so; call it yourself before clipping without a scaler.
        """
        for parameter, master in self._pairs:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to(torch.float32)
            if master.grad is None:
                master.grad = gradient
            else:
                master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the masters, and round them into the parameters."""
        if closure is not None:
            raise ValueError("MasterWeights.step: takes no closure; compute the gradients before")
        self.fetch_gradients()
        self.optimizer.step()
        self._round()

    def _round(self) -> None:
        for parameter, master in self._pairs:
            parameter.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free (or zero) the gradients of masters and parameters."""
        self.optimizer.zero_grad(set_to_none)
        for parameter, _ in self._pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and the masters: rounded weights alone would forget what has not shown yet."""
        return {**self.optimizer.state_dict(), "masters": [master.detach().clone() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave; the parameters become the rounded masters."""
        state = dict(state_dict)
        masters = state.pop("masters", None)
        if masters is None or len(masters) != len(self._pairs):
            there = "none" if masters is None else len(masters)
            raise ValueError(
                f"MasterWeights: the state has {there} master weights, but {len(self._pairs)} are kept here"
            )
        self.optimizer.load_state_dict(state)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        for (_, master), saved in zip(self._pairs, masters, strict=True):
            master.copy_(saved)
        self._round()


def _listed(params: Any) -> list[torch.Tensor]:
    return [params] if isinstance(params, torch.Tensor) else list(params)
