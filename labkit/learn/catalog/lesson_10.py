"""Lesson 10: a product by rows, forward and backward; where the two conjugate operators go; the bytes of a block."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent
from labkit.words import _

BATCH, WIDTH, INNER = 3, 4, 8
ITEMSIZE = 4  # float32


# --- numbers that all ranks can make ---


def drawn(seed: int, *shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + seed))


def part(tensor: Any, dim: int, rank: int, world_size: int) -> Any:
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


# --- a product by rows ---


def row_inputs(rank: int, world_size: int) -> tuple[Any, ...]:
    """x [B, in / N], weight [out, in / N], bias [out], gradient [B, out]."""
    x, weight = drawn(1, BATCH, INNER), drawn(2, WIDTH, INNER)
    return part(x, 1, rank, world_size), part(weight, 1, rank, world_size), drawn(3, WIDTH), drawn(4, BATCH, WIDTH)


def row_truth(rank: int, world_size: int) -> list[Any]:
    x, weight, bias, gradient = drawn(1, BATCH, INNER), drawn(2, WIDTH, INNER), drawn(3, WIDTH), drawn(4, BATCH, WIDTH)
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


# --- the two conjugate operators ---


def mlp_inputs(rank: int, world_size: int) -> tuple[Any, ...]:
    """x [B, d], this rank's up [inner / N, d] and down [d, inner / N]."""
    up, down = part(drawn(6, INNER, WIDTH), 0, rank, world_size), part(drawn(7, WIDTH, INNER), 1, rank, world_size)
    return drawn(5, BATCH, WIDTH), up, down


def drive_mlp(function: Callable[..., Any], *inputs: Any) -> Any:
    """Output, and gradients of x, up and down."""
    import torch

    x, up, down = (one.clone().requires_grad_() for one in inputs)
    output = function(x, up, down)
    if not isinstance(output, torch.Tensor) or output.shape != x.shape:
        raise Nonsense(describe(output), _("a tensor of shape {shape}").format(shape=tuple(x.shape)))
    if not output.requires_grad:
        raise Nonsense(_("a tensor without a gradient"), _("a tensor that autograd can go back from"))
    output.backward(drawn(8, BATCH, WIDTH))
    return [output.detach(), *(torch.zeros_like(one) if one.grad is None else one.grad for one in (x, up, down))]


def mlp_truth(rank: int, world_size: int) -> list[Any]:
    import torch.nn.functional as F

    x, up, down = (
        one.requires_grad_() for one in (drawn(5, BATCH, WIDTH), drawn(6, INNER, WIDTH), drawn(7, WIDTH, INNER))
    )
    output = F.gelu(x @ up.T) @ down.T
    output.backward(drawn(8, BATCH, WIDTH))
    return [output.detach(), x.grad, part(up.grad, 0, rank, world_size), part(down.grad, 1, rank, world_size)]


def mlp_is_right(which: slice, outcome: Outcome) -> Finding:
    names = ("the output", "the gradient of x", "the gradient of up", "the gradient of down")
    causes = (
        _("every rank has partial sums at the end: they must be added up there, and not before"),
        _("every rank has a part of the gradient at the start: they must be added up there"),
        _("its gradient is one rank's part, or counts several times: which operator stands behind it?"),
        _("its gradient is one rank's part, or counts several times: which operator stands behind it?"),
    )
    for one in outcome.ranks:
        truth = mlp_truth(one.rank, outcome.world_size)
        for name, found, wanted, cause in list(zip(names, one.value, truth, causes, strict=True))[which]:
            if not near(found, wanted):
                if near(found, wanted * outcome.world_size):
                    cause = _("it is {n} times too large: an operator too many, or one that sums both ways").format(
                        n=outcome.world_size
                    )
                told = _("rank {rank}: {name} has other numbers").format(rank=one.rank, name=name)
                return Finding(False, _("the numbers of one process"), told, cause)
    return Finding(True)


def two_all_reduces(outcome: Outcome, rank: int) -> float:
    return 2 * one_all_reduce(BATCH * WIDTH, outcome, rank)


def placed(x: Any, up: Any, down: Any, *, slip: str = "") -> Any:
    import torch.nn.functional as F

    from labkit.parallel.tensor import copy_in, gather_out, reduce_out

    if slip == "swapped":
        return copy_in(F.gelu(reduce_out(x) @ up.T) @ down.T)
    if slip == "twice":
        return reduce_out(copy_in(F.gelu(copy_in(x) @ up.T)) @ down.T)
    if slip == "gathers":
        hidden = gather_out(F.gelu(copy_in(x) @ up.T), -1)
        columns = gather_out(down, -1)
        return hidden @ columns.T
    if slip == "nothing":
        return F.gelu(x @ up.T) @ down.T
    if slip == "only the end":
        return reduce_out(F.gelu(x @ up.T) @ down.T)
    if slip == "only the start":
        return F.gelu(copy_in(x) @ up.T) @ down.T
    return reduce_out(F.gelu(copy_in(x) @ up.T) @ down.T)


register(
    Exercise(
        id="conjugate-operators",
        lesson="10",
        title=_("Place the two conjugate operators"),
        dots=1,
        minutes=8,
        answer="shared_mlp",
        hints=(
            _("Where do ranks have partial sums in forward? There they must be added up."),
            _(
                "In backward each rank has a part of the gradient of x. `copy_in` adds these up; forward it does "
                "nothing."
            ),
            _("`copy_in` around x, before the first product; `reduce_out` around the second product."),
        ),
        properties=(
            Property("output", _("the output is that of one process"), partial(mlp_is_right, slice(0, 1))),
            Property("gradients", _("and so are the gradients"), partial(mlp_is_right, slice(1, 4))),
            bytes_sent(two_all_reduces, statement=_("one all-reduce forward and one backward are sent")),
        ),
        trials=tuple(
            Trial(_("{ranks} ranks").format(ranks=ranks), ranks, mlp_inputs, drive_mlp, ("x", "up", "down"))
            for ranks in (2, 4)
        ),
        wrong_answers=(
            WrongAnswer("nothing", partial(placed, slip="nothing"), "output", "partial sums at the end"),
            WrongAnswer("only the start", partial(placed, slip="only the start"), "output", "partial sums at the end"),
            WrongAnswer("only the end", partial(placed, slip="only the end"), "gradients", "added up there"),
            WrongAnswer("swapped", partial(placed, slip="swapped"), "output", "partial sums at the end"),
            WrongAnswer("one in the middle too", partial(placed, slip="twice"), "gradients", "at the start"),
            WrongAnswer("gathers the middle", partial(placed, slip="gathers"), "bytes", "what is needed"),
        ),
    )
)


# --- the bytes of a block ---

SIZES = ((2, 16, 32, 2), (4, 32, 64, 4), (1, 8, 256, 8))


def block_sizes(rank: int, world_size: int, *, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    return sizes


def drive_number(function: Callable[..., Any], *inputs: Any) -> Any:
    value = function(*inputs)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Nonsense(describe(value), _("a number of bytes"))
    return float(value)


def is_bytes_of_block(outcome: Outcome) -> Finding:
    batch, length, width, ranks = outcome.inputs(0)
    whole, found = ITEMSIZE * batch * length * width, outcome.values[0]
    wanted = 4 * whole * 2 * (ranks - 1) / ranks
    if abs(found - wanted) < 1:
        return Finding(True)
    causes = {
        wanted / 2: _("half of it: count forward and backward, or both phases of the all-reduce"),
        wanted / 4: _("a quarter: four bytes a number, and four all-reduces"),
        4 * whole: _("an all-reduce sends 2 (N - 1) / N of the tensor, not the tensor once"),
        4 * wanted: _("four times too much: the activations that are reduced have the width d, not the inner 4 d"),
        wanted * 1.5: _("one for each layer: query, key, value and up need none"),
    }
    likely = next((words for value, words in causes.items() if abs(found - value) < 1), "")
    return Finding(
        False, _("{count:.0f} bytes").format(count=wanted), _("{count:.0f} bytes").format(count=found), likely
    )


def block(batch: int, length: int, width: int, ranks: int, *, factor: float = 1.0, naive: bool = False) -> float:
    share = 1.0 if naive else 2 * (ranks - 1) / ranks
    return factor * 4 * ITEMSIZE * batch * length * width * share


register(
    Exercise(
        id="block-bytes",
        lesson="10",
        title=_("Predict the bytes of a block"),
        dots=1,
        minutes=6,
        answer="bytes_of_block",
        hints=(
            _("Attention ends in one row-parallel layer, and so does the feed-forward part. How many sums is that?"),
            _("Two all-reduces forward and two backward, each of batch x length x width numbers of 4 bytes."),
            _("An all-reduce of K bytes sends 2 K (N - 1) / N from each rank."),
        ),
        properties=(Property("bytes", _("it is what each rank sends for one block"), is_bytes_of_block),),
        trials=tuple(
            Trial(
                _("batch {b}, length {s}, width {h}, {n} ranks").format(b=one[0], s=one[1], h=one[2], n=one[3]),
                1,
                partial(block_sizes, sizes=one),
                drive_number,
                ("batch", "length", "width", "ranks"),
            )
            for one in SIZES
        ),
        wrong_answers=(
            WrongAnswer("forward only", partial(block, factor=0.5), "bytes", "count forward and backward"),
            WrongAnswer("numbers, not bytes", partial(block, factor=0.25), "bytes", "four bytes a number"),
            WrongAnswer("the tensor once", partial(block, naive=True), "bytes", "2 (N - 1) / N"),
            WrongAnswer("the inner width", partial(block, factor=4), "bytes", "not the inner"),
            WrongAnswer("one for each layer", partial(block, factor=1.5), "bytes", "need none"),
        ),
    )
)
