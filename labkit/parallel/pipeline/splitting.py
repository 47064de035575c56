"""Splitting a model into stages, from outside: the model knows nothing of it.

A model is split as a sequence: nn.Sequential is one, labkit's models show themselves as one by `as_sequential`, and any
other may be given as one by hand.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from labkit.mesh.axes import AxisLike
from labkit.parallel.pipeline.partitioning import best_cuts, part_costs
from labkit.parallel.pipeline.profiling import StepProfile, profile_steps
from labkit.parallel.pipeline.stage import PipelineStage


class StageModule(nn.Module):
    """Some steps of the sequence in a row. What is a tuple between steps comes in and goes out as several tensors."""

    def __init__(self, steps: Iterable[nn.Module]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, *values: Any) -> Any:
        value: Any = values[0] if len(values) == 1 else values
        for step in self.steps:
            value = step(value)
        return value


class Split:
    """A model in stages. `cuts` are the steps with which the stages after the first begin, `costs` what each step was
    taken to cost; `print` shows them."""

    def __init__(
        self, model: nn.Module, steps: Sequence[nn.Module], cuts: Sequence[int], costs: Sequence[float], unit: str
    ) -> None:
        self.model, self.steps, self.cuts, self.costs, self.unit = model, list(steps), list(cuts), list(costs), unit
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._modules = [StageModule(part) for part in self._parts(self.steps)]
        _refuse_shared_buffers(self._modules)

    @property
    def num_stages(self) -> int:
        """How many stages."""
        return len(self.cuts) + 1

    @property
    def stage_costs(self) -> list[float]:
        """What each stage costs, in `unit`."""
        return part_costs(self.costs, self.cuts)

    @property
    def tied(self) -> dict[Parameter, tuple[int, ...]]:
        """The parameters that several stages hold, each with these stages."""
        holders = {p: tuple(s for s, module in enumerate(self._modules) if _has(module, p)) for p in self._names}
        return {parameter: stages for parameter, stages in holders.items() if len(stages) > 1}

    def module(self, stage: int) -> StageModule:
        """The stage's steps, not copies."""
        return self._modules[stage]

    def parameters(self, stage: int) -> dict[str, Parameter]:
        """The stage's parameters by their names in the model. What no step has is the first stage's: it is never
        trained, but must be somewhere."""
        held = dict.fromkeys(self._modules[stage].parameters())
        if stage == 0:
            everywhere = {parameter for module in self._modules for parameter in module.parameters()}
            held |= dict.fromkeys(parameter for parameter in self._names if parameter not in everywhere)
        return {self._names[parameter]: parameter for parameter in held}

    def buffers(self, stage: int) -> dict[str, Tensor]:
        """The stage's buffers by their names in the model."""
        held = {id(buffer) for buffer in self._modules[stage].buffers()}
        return {name: buffer for name, buffer in self.model.named_buffers() if id(buffer) in held}

    def stage(
        self, index: int, device: torch.device | str = "cpu", group: AxisLike = None, **options: Any
    ) -> PipelineStage:
        """The stage on this rank; options are PipelineStage's."""
        stage = PipelineStage(
            self._modules[index], index, self.num_stages, device, group=group, tied=self.tied, **options
        )
        stage.cuts = (len(self.steps), *self.cuts)
        return stage

    def release(self, keep: Iterable[int]) -> None:
        """Take the parameters and buffers of all stages but these out of the model. What stays has its names; the model
        as a whole can't be used on this rank any more."""
        kept = {id(value) for stage in keep for value in self.parameters(stage).values()}
        kept |= {id(value) for stage in keep for value in self.buffers(stage).values()}
        for module in self.model.modules():
            for store in (module._parameters, module._buffers):
                for name, value in store.items():
                    if value is not None and id(value) not in kept:
                        store[name] = None
        self._names = {parameter: name for parameter, name in self._names.items() if id(parameter) in kept}

    def _parts(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        return [values[begin:end] for begin, end in zip([0, *self.cuts], [*self.cuts, len(values)], strict=True)]

    def __str__(self) -> str:
        lines = []
        named = [f"{number} {_kind(step)}" for number, step in enumerate(self.steps)]
        for stage, (part, cost) in enumerate(zip(self._parts(named), self.stage_costs, strict=True)):
            share = cost / (sum(self.costs) or 1)
            lines.append(f"stage {stage}: {', '.join(part)} ({cost:.4g} {self.unit}, {100 * share:.0f} %)")
        for parameter, stages in self.tied.items():
            lines.append(f"tied: {self._names[parameter]} on stages {', '.join(map(str, stages))}")
        return "\n".join(lines)


def split_model(
    model: nn.Module,
    num_stages: int,
    *,
    by: str = "parameters",
    cuts: Sequence[int] | None = None,
    sequence: Sequence[nn.Module] | None = None,
    example: Any = None,
    profile: Sequence[StepProfile] | None = None,
) -> Split:
    """Split a model into `num_stages` stages; every rank does it alike, on the same model.

    Args:
        model: an nn.Sequential, one with `as_sequential()`, or any other with `sequence`.
        by: what is shared out evenly: "parameters" or "time". Measured times differ from rank to rank: measure once, by
            `profile_steps`, and give all ranks the same `profile` or `cuts`.
        cuts: the steps with which the stages after the first begin, where they are chosen by hand.
        sequence: modules that make up the model, applied one after the other.
        example: inputs of one micro-batch, for by="time" without a profile.
        profile: what `profile_steps` measured.

    A model that is no sequence, or too short, is refused in a sentence.
    """
    steps = list(sequence) if sequence is not None else steps_of(model)
    _refuse_strangers(model, steps)
    if not isinstance(num_stages, int) or not 1 <= num_stages <= len(steps):
        raise ValueError(
            f"split_model: {type(model).__name__} has {len(steps)} steps and can't make {num_stages} stages: give 1 to "
            f"{len(steps)}"
        )
    if by not in ("parameters", "time"):
        raise ValueError(f"split_model: by is {by!r}; give 'parameters', 'time', or cuts by hand")
    if by == "time":
        if profile is None and example is None:
            raise ValueError("split_model: by='time' measures the steps, or reads a profile: give example or profile")
        profile = profile_steps(steps, example) if profile is None else profile
        costs, unit = [one.seconds for one in profile], "s"
        if len(costs) != len(steps):
            raise ValueError(
                f"split_model: the profile has {len(costs)} steps and the model {len(steps)}: measure anew"
            )
    else:
        costs, unit = _parameter_counts(steps), "parameters"
    if cuts is None:
        cuts = best_cuts(costs, num_stages)
    elif len(cuts) != num_stages - 1 or list(cuts) != sorted(set(cuts)) or not set(cuts) <= set(range(1, len(steps))):
        raise ValueError(
            f"split_model: cuts is {list(cuts)}; give {num_stages - 1} numbers of steps from 1 to {len(steps) - 1}, "
            "each larger than the one before"
        )
    return Split(model, steps, cuts, costs, unit)


def steps_of(model: nn.Module) -> list[nn.Module]:
    """The steps of a model that is a sequence. Any other is a TypeError with the reason."""
    if isinstance(model, nn.Sequential):
        return list(model)
    as_sequential: Callable[[], nn.Sequential] | None = getattr(model, "as_sequential", None)
    if as_sequential is None:
        raise TypeError(
            f"split_model: {type(model).__name__} is no sequence: its forward may use its parts in any order, so that "
            "nobody can tell where to cut. Make it an nn.Sequential, give it as_sequential(), or name its parts in "
            "order by sequence="
        )
    return list(as_sequential())


def _refuse_strangers(model: nn.Module, steps: Sequence[nn.Module]) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for number, step in enumerate(steps):
        if not all(id(parameter) in known for parameter in step.parameters()):
            raise ValueError(
                f"split_model: step {number} ({_kind(step)}) has parameters that the model lacks: the steps must be "
                "the model's own parts, not copies"
            )


def _refuse_shared_buffers(modules: Sequence[nn.Module]) -> None:
    seen: dict[int, int] = {}
    for stage, module in enumerate(modules):
        for name, buffer in module.named_buffers():
            if seen.setdefault(id(buffer), stage) != stage:
                raise ValueError(
                    f"split_model: stages {seen[id(buffer)]} and {stage} share the buffer {name}, which each would "
                    "change by itself: cut elsewhere, or use two layers"
                )


def _parameter_counts(steps: Sequence[nn.Module]) -> list[float]:
    """The elements of each step's parameters; a tied one counts where it comes first."""
    seen: set[int] = set()
    counts = []
    for step in steps:
        new = [parameter for parameter in step.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in new}
        counts.append(float(sum(parameter.numel() for parameter in new)))
    return counts


def _has(module: nn.Module, parameter: Parameter) -> bool:
    return any(one is parameter for one in module.parameters())


def _kind(step: nn.Module) -> str:
    return type(getattr(step, "module", step)).__name__
