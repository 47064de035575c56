"""Lesson 01: the bytes that training holds whatever the batch: parameters, gradients, optimizer state."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.learn.answers import write_number
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.memory import MemoryLedger
from labkit.memory.state_formulas import MOMENTS
from labkit.models import transformer
from labkit.words import _

PARTS = ("parameters", "gradients", "optimizer_state")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": torch.optim.AdamW,
}
KEPT = {
    "sgd": _("plain SGD keeps nothing from step to step"),
    "momentum": _("momentum keeps one number for each trained parameter"),
    "adamw": _("AdamW keeps two numbers for each trained parameter: a mean of gradients, and one of their squares"),
}
WITHIN = 0.01  # AdamW's count of steps, 4 bytes a tensor, is forgiven


def same(one: float, other: float, within: float = WITHIN) -> bool:
    """Whether two numbers of bytes agree, up to a part."""
    return abs(one - other) <= within * abs(other)


def in_bytes(value: float) -> str:
    return _("{number} bytes").format(number=write_number(value))


def byte_count(value: Any, wanted: str) -> float:
    """A number of bytes that the learner's function returned; raises Nonsense for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise Nonsense(describe(value), wanted)
    return float(value)


# --- the networks of the trials ---


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def frozen() -> nn.Module:
    model = plain()
    model.get_submodule("0").requires_grad_(False)
    return model


def tied() -> nn.Module:
    return transformer(vocab_size=300, d_model=32, num_layers=1, num_heads=2, max_len=8, head="token")


def in_float64() -> nn.Module:
    return plain().double()


def tokens() -> Tensor:
    return torch.ones(4, 8, dtype=torch.int64)


def vectors() -> Tensor:
    return torch.ones(4, 64)


def given(rank: int, world_size: int, *, build: Callable[[], nn.Module], optimizer: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return build(), optimizer


# --- what is seen, and what it tells ---


def count_state(training_bytes: Any, model: nn.Module, optimizer: str) -> dict[str, Any]:
    """What the learner says, what the ledger counts after a step, and the counts by which slips are told."""
    wanted = _("three numbers: the bytes of parameters, of gradients and of optimizer state")
    answer = training_bytes(model, optimizer)
    if isinstance(answer, dict):
        answer = list(answer.values())
    if not isinstance(answer, (tuple, list)) or len(answer) != 3:
        raise Nonsense(describe(answer), wanted)
    said = [byte_count(value, wanted) for value in answer]
    trained = copy.deepcopy(model)
    stepping = OPTIMIZERS[optimizer](trained.parameters())
    dtype = next(model.parameters()).dtype
    inputs = tokens() if hasattr(model, "embedding") else vectors().to(dtype)
    with MemoryLedger(trained, stepping) as ledger:
        trained(inputs).square().sum().backward()
        stepping.step()
        held = ledger.now()
    return {
        "optimizer": optimizer,
        "said": dict(zip(PARTS, said, strict=True)),
        "held": {part: held.of(part) for part in PARTS},
        "buffers": held.of("buffers") / dtype.itemsize,
        "numbers": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "each time": sum(p.numel() for module in model.modules() for p in module.parameters(recurse=False)),
        "size": dtype.itemsize,
    }


def slips(seen: dict[str, Any], part: str) -> list[tuple[float, str]]:
    """What known slips would give for a part, in bytes, each with its name."""
    trained, numbers, size, optimizer = seen["trained"], seen["numbers"], seen["size"], seen["optimizer"]
    moments = MOMENTS[optimizer]
    times = moments if part == "optimizer_state" else 1
    found: list[tuple[float, str]] = []
    if part == "optimizer_state":
        found += [(other * trained * size, KEPT[optimizer]) for other in (0, 1, 2, 3) if other != moments]
    if part == "parameters":
        found.append((trained * size, _("frozen parameters take memory too")))
    else:
        found.append((times * numbers * size, _("a frozen parameter gets no gradient, and so no state either")))
    tied_twice = _("a tied weight is counted twice: model.parameters() gives each parameter once")
    found.append((times * seen["each time"] * size, tied_twice))
    found.append((times * 4 * numbers, _("not every number takes 4 bytes: ask p.element_size()")))
    buffers = _("buffers, such as running means, are no parameters: nothing is trained in them")
    found.append((times * (numbers + seen["buffers"]) * size, buffers))
    return found


def right(part: str, outcome: Outcome) -> Finding:
    seen = outcome.values[0]
    said, held = seen["said"][part], seen["held"][part]
    if same(said, held):
        return Finding(True)
    cause = next((cause for value, cause in slips(seen, part) if same(said, value)), "")
    if not cause and not held:
        cause = KEPT[seen["optimizer"]]
    return Finding(False, in_bytes(held), in_bytes(said), cause)


# --- plausible wrong answers ---


def sixteen_each(model: nn.Module, optimizer: str) -> tuple[float, ...]:
    numbers = sum(p.numel() for p in model.parameters())
    return 4 * numbers, 4 * numbers, MOMENTS[optimizer] * 4 * numbers


def _held(model: nn.Module, *, trained: bool) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not trained)


def always_adamw(model: nn.Module, optimizer: str) -> tuple[float, ...]:
    trained = _held(model, trained=True)
    return _held(model, trained=False), trained, 2 * trained


def forgets_momentum(model: nn.Module, optimizer: str) -> tuple[float, ...]:
    trained = _held(model, trained=True)
    return _held(model, trained=False), trained, 2 * trained if optimizer == "adamw" else 0


def one_moment(model: nn.Module, optimizer: str) -> tuple[float, ...]:
    trained = _held(model, trained=True)
    return _held(model, trained=False), trained, 0 if optimizer == "sgd" else trained


def gradients_for_all(model: nn.Module, optimizer: str) -> tuple[float, ...]:
    every = _held(model, trained=False)
    return every, every, MOMENTS[optimizer] * every


def forgets_the_frozen(model: nn.Module, optimizer: str) -> tuple[float, ...]:
    trained = _held(model, trained=True)
    return trained, trained, MOMENTS[optimizer] * trained


def by_submodule(model: nn.Module, optimizer: str) -> tuple[float, ...]:
    found = [p for module in model.modules() for p in module.parameters(recurse=False)]
    every = sum(p.numel() * p.element_size() for p in found)
    trained = sum(p.numel() * p.element_size() for p in found if p.requires_grad)
    return every, trained, MOMENTS[optimizer] * trained


def by_state_dict(model: nn.Module, optimizer: str) -> tuple[float, ...]:
    every = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    return every, every, MOMENTS[optimizer] * every


CASES: list[tuple[str, Callable[[], nn.Module], str]] = [
    *[(_("two layers, {optimizer}").format(optimizer=name), plain, name) for name in OPTIMIZERS],
    (_("with a batch norm, adamw"), normed, "adamw"),
    (_("in float64, adamw"), in_float64, "adamw"),
    (_("first layer frozen, adamw"), frozen, "adamw"),
    (_("first layer frozen, momentum"), frozen, "momentum"),
    (_("tied weights, adamw"), tied, "adamw"),
]

register(
    Exercise(
        id="training-bytes",
        lesson="01",
        title=_("The bytes of training"),
        dots=1,
        minutes=10,
        answer="training_bytes",
        hints=(
            _("A tensor takes `p.numel() * p.element_size()` bytes. Start with the sum over `model.parameters()`."),
            _("`model.parameters()` gives a tied weight once, and no buffers. Which of them get a gradient? Those with "
              "`p.requires_grad`."),
            _("An optimizer keeps numbers for what has a gradient: plain SGD none, momentum one, AdamW two for each."),
        ),
        properties=(
            Property("parameters", _("every parameter counts once"), partial(right, "parameters")),
            Property("gradients", _("there is a gradient for what is trained"), partial(right, "gradients")),
            Property("optimizer state", _("the optimizer keeps what it needs"), partial(right, "optimizer_state")),
        ),
        trials=tuple(
            Trial(label, 1, partial(given, build=build, optimizer=optimizer), count_state, ("model", "optimizer"))
            for label, build, optimizer in CASES
        ),
        wrong_answers=(
            WrongAnswer("16 bytes for each", sixteen_each, "parameters", "p.element_size()"),
            WrongAnswer("every optimizer is AdamW", always_adamw, "optimizer state", "SGD keeps nothing"),
            WrongAnswer("forgets momentum", forgets_momentum, "optimizer state", "momentum keeps one"),
            WrongAnswer("one number for AdamW", one_moment, "optimizer state", "AdamW keeps two"),
            WrongAnswer("gradients for frozen layers", gradients_for_all, "gradients", "frozen parameter gets no"),
            WrongAnswer("forgets frozen layers", forgets_the_frozen, "parameters", "frozen parameters take memory"),
            WrongAnswer("submodule by submodule", by_submodule, "parameters", "tied weight is counted twice"),
            WrongAnswer("the whole state_dict", by_state_dict, "parameters", "buffers"),
        ),
    )
)  # fmt: skip
