"""Lesson 04: gradients averaged from hooks."""

from collections.abc import Callable
from typing import Any

from labkit.learn.catalog_values import drawn
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent, messages
from labkit.words import _

STEPS = 2


def network(rank: int = 0) -> Any:
    """A small network; one of its parameters is frozen. The last bias differs from rank to rank by a little, so that
    averaging parameters moves them."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    module[0].bias.requires_grad_(False)
    last: Any = module[2]
    last.bias.data += rank / 64
    return module


def trained(module: Any) -> list[Any]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def flat(tensors: Any) -> Any:
    """All of them end to end, without their graphs."""
    import torch

    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def own_rows(rank: int, world_size: int) -> tuple[Any, ...]:
    """This rank's share of the batch [2 N, 5], other rows on every rank."""
    return (drawn(40 + rank, 2, 5),)


def gradients(module: Any, rows: Any) -> Any:
    """The gradients after one backward, flat; a missing one is zeros."""
    import torch

    module.zero_grad()
    module(rows).square().mean().backward()
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in trained(module))


def with_hooks(function: Callable[..., Any], rows: Any) -> Any:
    """Let the answer prepare a network, then run backward twice. How far the parameters moved meanwhile, and the
    gradients of the second backward."""
    import torch.distributed as dist

    module = network(dist.get_rank())
    function(module)
    before = flat(module.parameters())
    for _step in range(STEPS):
        found = gradients(module, rows)
    return float((flat(module.parameters()) - before).norm()), found


def _rows(outcome: Outcome) -> list[Any]:
    return [outcome.inputs(rank)[0] for rank in range(outcome.world_size)]


def _own_gradients(outcome: Outcome) -> list[Any]:
    return [gradients(network(rank), rows) for rank, rows in enumerate(_rows(outcome))]


def _hooked(outcome: Outcome) -> Finding:
    import torch

    own = _own_gradients(outcome)
    size, mean = len(own), sum(own) / len(own)
    for rank, (moved, _found) in enumerate(outcome.values):
        if moved > 0:
            wanted, measured = _("parameters as they were"), _("rank {rank}: backward moved them").format(rank=rank)
            return Finding(False, wanted, measured, _("averaged are the parameters, and not their gradients"))
    sources = [r for r in range(size) if all(torch.allclose(found, own[r], atol=1e-6) for _, found in outcome.values)]
    if size > 1 and sources:
        wanted, measured = _("the mean of all ranks' gradients"), _("on all ranks: that of rank {rank}")
        cause = _("every rank has the gradient of one and the same rank: broadcast is no average")
        return Finding(False, wanted, measured.format(rank=sources[0]), cause)
    for rank, (_moved, found) in enumerate(outcome.values):
        if torch.allclose(found, mean, rtol=1e-5, atol=1e-6):
            continue
        wanted = _("the mean of all ranks' gradients, of length {length:.4f}").format(length=mean.norm())
        measured = _("rank {rank}: length {length:.4f}").format(rank=rank, length=found.norm())
        return Finding(False, wanted, measured, _hook_cause(found, mean, own, rank, size))
    return Finding(True)


def _hook_cause(found: Any, mean: Any, own: list[Any], rank: int, size: int) -> str:
    import torch

    def same(other: Any) -> bool:
        return torch.allclose(found, other, rtol=1e-4, atol=1e-6)

    if same(mean * size):
        return _("it is {n} times too long on {n} ranks: divide by the number of ranks").format(n=size)
    if same(mean / size):
        return _("it is {n} times too short on {n} ranks: divided twice").format(n=size)
    if same(own[rank]):
        return _("it is this rank's own gradient: the hook is not called, or calls no collective")
    right = torch.isclose(found, mean, rtol=1e-4, atol=1e-6)
    if right.any() and not right.all():
        return _("some parameters are right, others are not: does every trained parameter have a hook?")
    return ""


def _counts() -> list[int]:
    return [parameter.numel() for parameter in trained(network())]


def all_reduces(outcome: Outcome, rank: int, what: str, lengths: list[int], times: int) -> int:
    """The "messages" or "bytes" that `rank` sends in `times` ring all-reduces of each of these lengths."""
    from labkit.collectives.formulas import all_reduce_sent

    sent = [all_reduce_sent("ring", length, 4, outcome.world_size) for length in lengths]
    return times * sum(int(getattr(one, what)[rank]) for one in sent)


def _mean(gradient: Any, group_size: int | None = None) -> None:
    import torch.distributed as dist

    from labkit import collectives

    collectives.all_reduce(gradient)
    gradient /= dist.get_world_size() if group_size is None else group_size


def _hook_on_all(module: Any, hook: Callable[[Any], Any], *, only: Callable[[Any], bool] = lambda p: True) -> None:
    for parameter in trained(module):
        if only(parameter):
            parameter.register_post_accumulate_grad_hook(hook)


def averages_parameters(module: Any) -> None:
    """The popular one: nobody notices while the ranks draw similar batches."""
    _hook_on_all(module, lambda parameter: _mean(parameter.data))


def sums_only(module: Any) -> None:
    _hook_on_all(module, lambda parameter: _mean(parameter.grad, 1))


def divides_twice(module: Any) -> None:
    import torch.distributed as dist

    _hook_on_all(module, lambda parameter: _mean(parameter.grad, dist.get_world_size() ** 2))


def forgets_the_biases(module: Any) -> None:
    _hook_on_all(module, lambda parameter: _mean(parameter.grad), only=lambda parameter: parameter.dim() > 1)


def broadcasts(module: Any) -> None:
    from labkit import collectives

    _hook_on_all(module, lambda parameter: collectives.broadcast(parameter.grad, 0))


def averages_at_once(module: Any) -> None:
    """Before any backward there is nothing to average."""
    for parameter in trained(module):
        if parameter.grad is not None:
            _mean(parameter.grad)


def hooks_the_frozen_too(module: Any) -> None:
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: _mean(parameter.grad))


def sends_all_from_every_hook(module: Any) -> None:
    def hook(parameter: Any) -> None:
        _mean(parameter.grad)
        for other in trained(module):
            _mean(other.detach().clone())

    _hook_on_all(module, hook)


register(
    Exercise(
        id="hook",
        lesson="04",
        title=_("Write the hook"),
        dots=2,
        minutes=12,
        answer="average_from_hooks",
        hints=(
            _("`parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` when the gradient is in "
              "`parameter.grad`."),
            _("In the hook: one all-reduce of `parameter.grad`, in place. It sums; what is missing to a mean?"),
            _("A frozen parameter (`requires_grad` is False) takes no hook: skip it."),
        ),
        properties=(
            Property("equality", _("after backward every rank holds the mean of all ranks' gradients"), _hooked),
            messages(
                lambda outcome, rank: all_reduces(outcome, rank, "messages", _counts(), STEPS),
                statement=_("by one all-reduce for each trained parameter"),
                cause=lambda outcome, rank: _more_messages(outcome, rank),
            ),
            bytes_sent(
                lambda outcome, rank: all_reduces(outcome, rank, "bytes", _counts(), STEPS),
                statement=_("of its gradient, and of nothing else"),
            ),
        ),
        trials=tuple(
            Trial(_("3 of 4 parameters trained, {ranks} ranks").format(ranks=ranks), ranks, own_rows, with_hooks)
            for ranks in (1, 2, 3)
        ),
        wrong_answers=(
            WrongAnswer("averages parameters", averages_parameters, "equality", "averaged are the parameters"),
            WrongAnswer("sums", sums_only, "equality", "divide by the number of ranks"),
            WrongAnswer("divides twice", divides_twice, "equality", "divided twice"),
            WrongAnswer("forgets the biases", forgets_the_biases, "equality", "does every trained parameter"),
            WrongAnswer("broadcasts", broadcasts, "equality", "broadcast is no average"),
            WrongAnswer("averages before backward", averages_at_once, "equality", "the hook is not called"),
            WrongAnswer("hooks the frozen too", hooks_the_frozen_too, "runs", ""),
            WrongAnswer("sends everything from every hook", sends_all_from_every_hook, "messages", "more than one"),
        ),
    )
)  # fmt: skip


def _more_messages(outcome: Outcome, rank: int) -> str:
    wanted = all_reduces(outcome, rank, "messages", _counts(), STEPS)
    if outcome.ranks[rank].record.messages > wanted:
        return _("a hook is called for each parameter: more than one all-reduce in it is too many")
    return ""
