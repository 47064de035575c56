"""Lesson 08: a checkpoint written as an autograd function, and one whose dropout draws the same mask again."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.memory import MemoryLedger
from labkit.words import _

ROWS, WIDTH, HIDDEN = 6, 8, 32
Call = Callable[..., Any]


def network(dropout: float) -> nn.Module:
    """A few layers, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Dropout(dropout), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(HIDDEN, WIDTH))


def step(call: Call, dropout: float, *, watched: bool = False) -> dict[str, Any]:
    """What a step through `call(function, x)` gives and leaves; if `watched` what it holds, too.

    Apart, since autograd gives another tensor back where a ledger watches what it saves, and not x itself.
    """
    net = network(dropout)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(80)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        weights = torch.randn(ROWS, WIDTH)
        with MemoryLedger(net) if watched else contextlib.nullcontext() as ledger:
            output = call(lambda value: net(value), x)
            if not isinstance(output, Tensor) or output.shape != x.shape:
                raise Nonsense(describe(output), _("the output of the function, a tensor"))
            after = torch.rand(4)  # what the rest of the network would draw
            held = ledger.now().of("activations") + ledger.now().of("inputs") if ledger is not None else 0
            if output.requires_grad:
                (output * weights).sum().backward()
            later = torch.rand(4)
    parameters = [p.grad for p in net.parameters()]
    return {"output": output.detach(), "x": x.grad, "parameters": parameters, "held": held, "after": after,
            "later": later, "needs": output.requires_grad}  # fmt: skip


def drive(checkpointed: Call, dropout: float) -> dict[str, Any]:
    """The learner's step, and that of a plain call."""
    mine, plain = step(checkpointed, dropout), step(lambda function, x: function(x), dropout)
    mine["held"] = step(checkpointed, dropout, watched=True)["held"]
    return {"mine": mine, "plain": plain}


def given(rank: int, world_size: int, *, dropout: float) -> tuple[Any, ...]:
    return (dropout,)


# --- what is asked ---


def _numbers(value: Any) -> str:
    if value is None:
        return _("None")
    return ", ".join(f"{number:.4g}" for number in value.flatten()[:4].tolist())


def _compared(part: str, cause: Callable[[dict[str, Any], dict[str, Any]], str], outcome: Outcome) -> Finding:
    seen = outcome.values[0]
    mine, plain = seen["mine"][part], seen["plain"][part]
    if mine is not None and torch.equal(mine, plain):
        return Finding(True)
    return Finding(False, _numbers(plain), _numbers(mine), cause(seen["mine"], seen["plain"]))


def _output_cause(mine: dict[str, Any], plain: dict[str, Any]) -> str:
    return _("forward must be the plain call: it draws its mask from the state that it finds")


def _is_twice(mine: dict[str, Any], plain: dict[str, Any]) -> bool:
    return mine["x"] is not None and torch.allclose(mine["x"], 2 * plain["x"])


def _x_cause(mine: dict[str, Any], plain: dict[str, Any]) -> str:
    if not mine["needs"]:
        return _("the output needs no gradient: apply the autograd function to x itself")
    if mine["x"] is None:
        return _("backward returns nothing for x")
    if _is_twice(mine, plain):
        return _("x gets its gradient twice, within and from backward: run the function on x.detach().requires_grad_()")
    return _("the gradient that comes in must go through the function: output.backward(gradient)")


def _mask_cause(mine: dict[str, Any], plain: dict[str, Any]) -> str:
    if mine["x"] is None or _is_twice(mine, plain):
        return _x_cause(mine, plain)
    return _("the recomputation drew another mask: first set the random state back that forward began with")


def _after_cause(mine: dict[str, Any], plain: dict[str, Any]) -> str:
    return _("backward left the random state changed: put the one it found back at its end")


def holds_only_x(outcome: Outcome) -> Finding:
    """No more than x is held between forward and backward."""
    held, x = outcome.values[0]["mine"]["held"], 4 * ROWS * WIDTH
    if held <= x:
        return Finding(True)
    cause = _("autograd recorded the function in forward, or something computed in it is kept: save x alone")
    return Finding(False, _("{n} bytes, those of x").format(n=x), _("{n} bytes").format(n=held), cause)


def parameters_too(outcome: Outcome) -> Finding:
    """The parameters within the function get their gradients."""
    seen = outcome.values[0]
    for mine, plain in zip(seen["mine"]["parameters"], seen["plain"]["parameters"], strict=True):
        if mine is None or not torch.equal(mine, plain):
            cause = _("autograd.grad gives only what it is asked for; backward fills the parameters' grad too")
            if mine is not None:
                cause = _("each parameter gets its gradient once")
            return Finding(False, _numbers(plain), _numbers(mine), cause)
    return Finding(True)


# --- plausible wrong answers ---


def recompute(
    function: Call,
    x: Tensor,
    *,
    seed: int | None = None,
    state: bool = False,
    back: bool = False,
    ignore: bool = False,
    through: bool = False,
    only_x: bool = False,
    keep: bool = False,
    attached: bool = False,
    late: bool = False,
) -> Any:
    """A checkpoint with its faults to choose."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.state = torch.get_rng_state()
            if seed is not None:
                torch.manual_seed(seed)
            if keep:
                with torch.enable_grad():
                    ctx.output = function(x.detach().requires_grad_())
                return ctx.output.detach()  # type: ignore[no-any-return]
            output = function(x)
            if late:
                ctx.state = torch.get_rng_state()
            return output  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            if through:
                return gradient
            x = ctx.saved_tensors[0]
            x = x if attached else x.detach().requires_grad_()
            found = torch.get_rng_state()
            if state:
                torch.set_rng_state(ctx.state)
            if seed is not None:
                torch.manual_seed(seed)
            with torch.enable_grad():
                output = function(x)
            if back:
                torch.set_rng_state(found)
            if only_x:
                return torch.autograd.grad(output, x, gradient)[0]
            output.backward(torch.ones_like(gradient) if ignore else gradient)
            return x.grad

    return Recompute.apply(x)


def no_checkpoint(function: Call, x: Tensor) -> Any:
    return function(x)


register(
    Exercise(
        id="checkpoint-function",
        lesson="08",
        title=_("A checkpoint as an autograd function"),
        dots=2,
        minutes=12,
        answer="checkpointed",
        hints=(
            _("Within `forward` of a `torch.autograd.Function` nothing is recorded: call the function there, and save "
              "only `x`, with `ctx.save_for_backward(x)`."),
            _("`backward` gets the gradient of the output. Make a leaf of `x` (`x.detach().requires_grad_()`), call "
              "the function again under `torch.enable_grad()`, and send the gradient back through what came out."),
            _("`output.backward(gradient)` fills the `grad` of the parameters and of your leaf. Return the leaf's."),
        ),
        properties=(
            Property("output", _("its output is that of the function"), partial(_compared, "output", _output_cause)),
            Property("memory", _("it holds x alone between forward and backward"), holds_only_x),
            Property("input", _("the input gets its gradient to the last bit"), partial(_compared, "x", _x_cause)),
            Property("parameters", _("the parameters within get theirs"), parameters_too),
        ),
        trials=(Trial(_("three layers"), inputs=partial(given, dropout=0.0), drive=drive),),
        wrong_answers=(
            WrongAnswer("no checkpoint", no_checkpoint, "memory", "recorded the function"),
            WrongAnswer("keeps the graph", partial(recompute, keep=True), "memory", "recorded the function"),
            WrongAnswer("ignores the gradient", partial(recompute, ignore=True), "input", "output.backward(gradient)"),
            WrongAnswer("hands it through", partial(recompute, through=True), "input", "must go through the function"),
            WrongAnswer("no leaf of its own", partial(recompute, attached=True), "input", "gets its gradient twice"),
            WrongAnswer("asks for x only", partial(recompute, only_x=True), "parameters", "only what it is asked for"),
        ),
    )
)  # fmt: skip

register(
    Exercise(
        id="checkpoint-dropout",
        lesson="08",
        title=_("Dropout made right"),
        dots=2,
        minutes=8,
        answer="checkpointed_with_dropout",
        hints=(
            _("Dropout draws its mask from PyTorch's random state. `torch.get_rng_state()` gives it, "
              "`torch.set_rng_state(state)` sets it. Which state did forward begin with?"),
            _("Keep the state on `ctx` before the function runs, and set it in backward before it runs again."),
            _("Whatever comes after backward must draw what it would have drawn without the checkpoint: take the state "
              "that backward finds, and put it back after the recomputation."),
        ),
        properties=(
            Property("output", _("its output is that of a plain call"), partial(_compared, "output", _output_cause)),
            Property("memory", _("it holds x alone between forward and backward"), holds_only_x),
            Property("mask", _("the gradient is that of forward's mask"), partial(_compared, "x", _mask_cause)),
            Property("afterwards", _("what is drawn later is what would have been"),
                     partial(_compared, "later", _after_cause)),
        ),
        trials=(Trial(_("dropout of one half"), inputs=partial(given, dropout=0.5), drive=drive),),
        wrong_answers=(
            WrongAnswer("another mask", recompute, "mask", "another mask"),
            WrongAnswer("the state from after", partial(recompute, state=True, late=True), "mask", "began with"),
            WrongAnswer("no leaf of its own", partial(recompute, state=True, attached=True), "mask", "twice"),
            WrongAnswer("a fixed seed", partial(recompute, seed=1), "output", "from the state that it finds"),
            WrongAnswer("left changed", partial(recompute, state=True), "afterwards", "put the one it found back"),
            WrongAnswer("no checkpoint", no_checkpoint, "memory", "recorded the function"),
        ),
    )
)  # fmt: skip
