"""Lesson 11: gradients scattered from hooks."""

from collections.abc import Callable
from typing import Any

from labkit.learn.catalog_values import drawn, rank_and_size
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent
from labkit.words import _

SHAPES = ((6, 4), (12,), (4, 6))  # 6 x 4 in, whatever the world size divides


def small_network() -> Any:
    """Two layers and a bias, sizes that 1 to 4 ranks divide."""
    import torch
    from torch import nn

    module: Any = nn.Module()
    for name, shape in zip(("first", "bias", "last"), SHAPES, strict=True):
        module.register_parameter(name, nn.Parameter(drawn(len(name), *shape)))

    def forward(x: Any) -> Any:
        return torch.tanh(x @ module.first.view(4, 6)) @ module.last.view(6, 4) + module.bias[:4]

    module.forward = forward
    return module


def rows_of_rank(rank: int, world_size: int) -> tuple[Any, ...]:
    """This rank's share of the batch [3, 4]."""
    return (drawn(50 + rank, 3, 4),)


def _own_gradients(rows: Any) -> list[Any]:
    module = small_network()
    module(rows).square().sum().backward()
    return [parameter.grad.flatten() for parameter in module.parameters()]


def from_hooks(function: Callable[..., Any], rows: Any) -> Any:
    """Prepare a network and run backward: the shards end to end, and the bytes of whole gradients that are left."""
    import torch

    module = small_network()
    shards = function(module)
    module(rows).square().sum().backward()
    if not isinstance(shards, dict) or set(shards) != {name for name, _ in module.named_parameters()}:
        wanted = _("a dict that has a shard for each parameter's name after backward")
        raise Nonsense(describe(shards), wanted)
    left = sum(parameter.grad.numel() for parameter in module.parameters() if parameter.grad is not None)
    return left, torch.cat([shards[name].detach().flatten() for name, _ in module.named_parameters()])


def _mean_shards(outcome: Outcome, divisor: float | None = None) -> list[Any]:
    import torch

    size = outcome.world_size
    own = [_own_gradients(outcome.inputs(rank)[0]) for rank in range(size)]
    means = [sum(parts) / (size if divisor is None else divisor) for parts in zip(*own, strict=True)]
    return [torch.cat([mean.view(size, -1)[rank] for mean in means]) for rank in range(size)]


def _scattered(outcome: Outcome) -> Finding:
    import torch

    size, right, summed = outcome.world_size, _mean_shards(outcome), _mean_shards(outcome, 1)
    for rank, (_left, found) in enumerate(outcome.values):
        if found.shape == right[rank].shape and torch.allclose(found, right[rank], rtol=1e-5, atol=1e-5):
            continue
        wanted = _("this rank's parts of the mean gradients, {n} elements").format(n=len(right[rank]))
        measured, cause = _("rank {rank}: {n} elements").format(rank=rank, n=len(found)), ""
        if found.shape != right[rank].shape:
            cause = _("a shard is one part of N: is this the whole gradient?")
        elif size > 1 and torch.allclose(found, summed[rank], rtol=1e-4, atol=1e-4):
            cause = _("it is the sum: divide by the number of ranks")
        elif size > 1 and not outcome.ranks[rank].record.bytes_sent:
            cause = _("nothing was sent: the other ranks' gradients are missing")
        elif size > 1 and any(torch.allclose(found, other, rtol=1e-4, atol=1e-4) for other in right):
            cause = _("it is another rank's part")
        return Finding(False, wanted, measured, cause)
    return Finding(True)


def _freed(outcome: Outcome) -> Finding:
    for rank, (left, _found) in enumerate(outcome.values):
        if left:
            measured = _("rank {rank}: whole gradients of {n} elements are left").format(rank=rank, n=left)
            return Finding(False, _("no whole gradient"), measured, _("set parameter.grad to None when it is reduced"))
    return Finding(True)


def _one_reduce_scatter(outcome: Outcome, rank: int) -> float:
    size = outcome.world_size
    return 4 * sum(len(one) for one in _own_gradients(outcome.inputs(0)[0])) * (size - 1) / size


def _hooked(module: Any, to_shard: Callable[[Any], Any], *, frees: bool = True) -> Any:
    shards: dict[str, Any] = {}

    def hook_of(name: str) -> Callable[[Any], None]:
        def hook(parameter: Any) -> None:
            shards[name] = to_shard(parameter.grad.flatten())
            if frees:
                parameter.grad = None

        return hook

    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook_of(name))
    return shards


def _reduced(gradient: Any, divisor: int) -> Any:
    from labkit import collectives

    _rank, size = rank_and_size()
    shard = gradient.new_empty(len(gradient) // size)
    collectives.reduce_scatter_tensor(shard, gradient / divisor)
    return shard


def never_frees(module: Any) -> Any:
    return _hooked(module, lambda gradient: _reduced(gradient, rank_and_size()[1]), frees=False)


def scatters_sums(module: Any) -> Any:
    return _hooked(module, lambda gradient: _reduced(gradient, 1))


def _all_reduced(gradient: Any) -> Any:
    from labkit import collectives

    collectives.all_reduce(gradient)
    return gradient / rank_and_size()[1]


def _own_part(gradient: Any) -> Any:
    rank, size = rank_and_size()
    return gradient.view(size, -1)[rank]


def all_reduces_and_cuts(module: Any) -> Any:
    return _hooked(module, lambda gradient: _own_part(_all_reduced(gradient)))


def keeps_its_own_part(module: Any) -> Any:
    """Nothing is sent."""
    return _hooked(module, lambda gradient: _own_part(gradient / rank_and_size()[1]).clone())


def keeps_the_whole(module: Any) -> Any:
    return _hooked(module, _all_reduced)


register(
    Exercise(
        id="scatter-hook",
        lesson="11",
        title=_("Reduce-scatter in the hook"),
        dots=2,
        minutes=12,
        answer="scatter_from_hooks",
        hints=(
            _("As the hook of lesson 04, with a reduce-scatter in place of the all-reduce."),
            _("`shard = torch.empty(gradient.numel() // N)`, then `reduce_scatter_tensor(shard, gradient)`; divide by "
              "N, before or after."),
            _("A hook knows its parameter and not its name: make one for each name. At its end the whole gradient "
              "must go: `parameter.grad = None`."),
        ),
        properties=(
            Property("equality", _("each rank has its part of each mean gradient"), _scattered),
            Property("freed", _("no whole gradient outlives its hook"), _freed),
            bytes_sent(_one_reduce_scatter, statement=_("a backward sends P (N - 1) / N elements")),
        ),
        trials=tuple(
            Trial(_("3 parameters, {ranks} ranks").format(ranks=ranks), ranks, rows_of_rank, from_hooks)
            for ranks in (1, 2, 3)
        ),
        wrong_answers=(
            WrongAnswer("never frees", never_frees, "freed", "set parameter.grad to None"),
            WrongAnswer("scatters sums", scatters_sums, "equality", "divide by the number of ranks"),
            WrongAnswer("all-reduces and cuts", all_reduces_and_cuts, "bytes", "2 times"),
            WrongAnswer("keeps its own part", keeps_its_own_part, "equality", "other ranks' gradients"),
            WrongAnswer("keeps the whole gradient", keeps_the_whole, "equality", "one part of N"),
        ),
    )
)  # fmt: skip
