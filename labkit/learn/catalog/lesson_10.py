"""Lesson 10: a product by rows, forward and backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.learn.catalog_values import drawn
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent
from labkit.words import _

BATCH, WIDTH, INNER = 3, 4, 8
ITEMSIZE = 4  # float32


def part(tensor: Any, dim: int, rank: int, world_size: int) -> Any:
    """The rank's slice of a dimension, a copy."""
    return tensor.tensor_split(world_size, dim)[rank].clone()


def near(found: Any, wanted: Any) -> bool:
    import torch

    return bool(torch.allclose(found, wanted, rtol=1e-4, atol=1e-5))


def tensors(value: Any, shapes: list[tuple[int, ...]], names: str) -> tuple[Any, ...]:
    """What the answer returned, if it is tensors of these shapes; else refused."""
    import torch

    wanted = _("{names}, of shapes {shapes}").format(names=names, shapes=", ".join(map(str, shapes)))
    if not isinstance(value, list | tuple) or len(value) != len(shapes):
        raise Nonsense(describe(value), wanted)
    for one, shape in zip(value, shapes, strict=True):
        if not isinstance(one, torch.Tensor) or tuple(one.shape) != shape:
            raise Nonsense(describe(one), wanted)
    return tuple(one.detach() for one in value)


def row_inputs(rank: int, world_size: int) -> tuple[Any, ...]:
    """x [B, in / N], weight [out, in / N], bias [out], gradient [B, out]."""
    x, weight = drawn(101, BATCH, INNER), drawn(102, WIDTH, INNER)
    return part(x, 1, rank, world_size), part(weight, 1, rank, world_size), drawn(103, WIDTH), drawn(104, BATCH, WIDTH)


def row_truth(rank: int, world_size: int) -> list[Any]:
    x, weight = drawn(101, BATCH, INNER), drawn(102, WIDTH, INNER)
    bias, gradient = drawn(103, WIDTH), drawn(104, BATCH, WIDTH)
    of_x, of_weight = part(gradient @ weight, 1, rank, world_size), part(gradient.T @ x, 1, rank, world_size)
    return [x @ weight.T + bias, of_x, of_weight, gradient.sum(0)]


def drive_row(function: Callable[..., Any], *inputs: Any) -> Any:
    x, weight, bias, gradient = inputs
    shapes = [tuple(one.shape) for one in (gradient, x, weight, bias)]
    return tensors(function(*(one.clone() for one in inputs)), shapes, "output, grad_x, grad_weight, grad_bias")


def right_output(outcome: Outcome) -> Finding:
    for one in outcome.ranks:
        x, weight, bias, _gradient = outcome.inputs(one.rank)
        wanted, found = row_truth(one.rank, outcome.world_size)[0], one.value[0]
        if not near(found, wanted):
            cause = ""
            if near(found, wanted + (outcome.world_size - 1) * bias):
                cause = _("the bias is in the sum once for every rank: add it behind the all-reduce")
            elif near(found, x @ weight.T + bias) or near(found, x @ weight.T):
                cause = _("these are this rank's partial sums: those of the other ranks are missing")
            elif near(found, (wanted - bias) / outcome.world_size + bias):
                cause = _("partial sums are added up, not averaged")
            elif near(found, wanted - bias):
                cause = _("the bias is missing")
            return Finding(
                False, _("x W^T + bias of all ranks"), _("rank {rank}: other numbers").format(rank=one.rank), cause
            )
    return Finding(True)


def right_row_gradients(outcome: Outcome) -> Finding:
    names = ("grad_x", "grad_weight", "grad_bias")
    for one in outcome.ranks:
        for name, found, wanted in zip(names, one.value[1:], row_truth(one.rank, outcome.world_size)[1:], strict=True):
            if not near(found, wanted):
                cause = ""
                if near(found, wanted * outcome.world_size):
                    cause = _("it is summed over the ranks, which all have the same: a row layer sends nothing back")
                elif near(found, wanted / outcome.world_size):
                    cause = _("it is divided by the number of ranks: each rank's slice has the whole gradient")
                elif name == "grad_x":
                    cause = _("each rank has other inputs: their gradients must not be added up")
                told = _("rank {rank}: {name} has other numbers").format(rank=one.rank, name=name)
                return Finding(False, _("the gradient of one process"), told, cause)
    return Finding(True)


def one_all_reduce(elements: int, outcome: Outcome, rank: int) -> float:
    from labkit.collectives.formulas import all_reduce_sent

    return all_reduce_sent("ring", elements, ITEMSIZE, outcome.world_size).bytes[rank]


def row(x: Any, weight: Any, bias: Any, gradient: Any, *, slip: str = "") -> Any:
    """The solution, and what goes wrong with it."""
    import torch.distributed as dist

    from labkit.collectives import all_reduce

    output = x @ weight.T
    if slip == "bias first":
        output = output + bias
    if slip != "no sum":
        all_reduce(output)
    if slip == "average":
        output = output / dist.get_world_size()
    if slip != "bias first":
        output = output + bias
    grad_x, grad_weight, grad_bias = gradient @ weight, gradient.T @ x, gradient.sum(0)
    if slip == "sum of grad_x":
        all_reduce(grad_x)
    if slip == "sum of grad_bias":
        all_reduce(grad_bias)
    if slip == "gradient over N":
        grad_weight = grad_weight / dist.get_world_size()
    if slip == "sum of the gradient":
        gradient = gradient.clone()
        all_reduce(gradient)
        gradient = gradient / dist.get_world_size()
    return output, grad_x, grad_weight, grad_bias


register(
    Exercise(
        id="row-parallel",
        lesson="10",
        title=_("A product by rows, forward and backward"),
        dots=2,
        minutes=10,
        answer="row_parallel",
        hints=(
            _("Each rank has some of the inputs and the matching rows of W. What is x @ weight.T on one rank?"),
            _("Partial sums: `all_reduce` adds them up, in place. The bias belongs to the sum, so it comes behind it."),
            _(
                "Backward, every rank has the whole gradient of the output already: `gradient @ weight`, `gradient.T "
                "@ x` and `gradient.sum(0)`. Nothing is sent."
            ),
        ),
        properties=(
            Property("output", _("the output is that of one process, on every rank"), right_output),
            Property("gradients", _("and so are the gradients"), right_row_gradients),
            bytes_sent(
                partial(one_all_reduce, BATCH * WIDTH),
                statement=_("one all-reduce of the output is sent, and nothing else"),
            ),
        ),
        trials=tuple(
            Trial(
                _("{ranks} ranks").format(ranks=ranks), ranks, row_inputs, drive_row,
                ("x", "weight", "bias", "gradient"),
            )
            for ranks in (2, 4)
        ),
        wrong_answers=(
            WrongAnswer("bias before the sum", partial(row, slip="bias first"), "output", "once for every rank"),
            WrongAnswer("no sum", partial(row, slip="no sum"), "output", "partial sums"),
            WrongAnswer("an average", partial(row, slip="average"), "output", "added up, not averaged"),
            WrongAnswer("adds up grad_x", partial(row, slip="sum of grad_x"), "gradients", "must not be added up"),
            WrongAnswer("adds up grad_bias", partial(row, slip="sum of grad_bias"), "gradients", "all have the same"),
            WrongAnswer("gradient over N", partial(row, slip="gradient over N"), "gradients", "divided by the number"),
            WrongAnswer("reduces in backward too", partial(row, slip="sum of the gradient"), "bytes", "sent twice"),
        ),
    )
)  # fmt: skip
