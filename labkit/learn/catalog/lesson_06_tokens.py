"""Lesson 06: micro-batches on ranks, weighed by their valid tokens, and reduced once."""

from collections.abc import Callable
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

VOCABULARY, LENGTH, PARTS = 7, 5, 3
IGNORED = -100


def network() -> Any:
    """Tokens [rows, 5] to scores [rows, 5, 7]; the same at every call."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(61)
        return nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, VOCABULARY))


def own_parts(rank: int, world_size: int) -> tuple[Any, ...]:
    """This rank's micro-batches: tokens and next tokens [2, 5], of which other numbers count in each."""
    import torch

    random = torch.Generator().manual_seed(62 + rank)
    parts = []
    for part in range(PARTS):
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=random)
        valid = torch.arange(LENGTH) < torch.tensor([[(part + 2 * rank) % LENGTH + 1], [part + 2]])
        parts.append((tokens[:, :-1], torch.where(valid, tokens[:, 1:], IGNORED)))
    return (parts,)


def flat(tensors: Any) -> Any:
    import torch

    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def wrapped(function: Callable[..., Any], parts: list[tuple[Any, Any]]) -> Any:
    """The gradient that the answer leaves on this rank, in a network under DistributedDataParallel."""
    import torch

    from labkit.parallel import DistributedDataParallel

    wrapper = DistributedDataParallel(network())
    function(wrapper, parts)
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in wrapper.module.parameters())


def loss_of(module: Any, part: tuple[Any, Any], reduction: str = "sum") -> Any:
    import torch.nn.functional as F

    scores = module(part[0])
    return F.cross_entropy(scores.flatten(0, 1), part[1].flatten(), ignore_index=IGNORED, reduction=reduction)


def tokens_in(parts: list[tuple[Any, Any]]) -> int:
    return sum(int((targets != IGNORED).sum()) for _, targets in parts)


def everyones(number: float) -> float:
    import torch

    from labkit import collectives

    total = torch.tensor([float(number)])
    collectives.all_reduce(total)
    return float(total)


def ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


# --- judging ---


def _parts(outcome: Outcome) -> list[list[tuple[Any, Any]]]:
    return [outcome.inputs(rank)[0] for rank in range(outcome.world_size)]


def _gradient(part: tuple[Any, Any]) -> Any:
    module = network()
    loss_of(module, part).backward()
    return flat(parameter.grad for parameter in module.parameters())


def _equal(outcome: Outcome) -> Finding:
    import torch

    parts, size = _parts(outcome), outcome.world_size
    sums = [[_gradient(part) for part in mine] for mine in parts]
    weights = [[tokens_in([part]) for part in mine] for mine in parts]
    total, all_sums = sum(map(sum, weights)), [sum(mine) for mine in sums]
    truth = sum(all_sums) / total
    if all(torch.allclose(found, truth, rtol=1e-5, atol=1e-6) for found in outcome.values):
        return Finding(True)
    apart = any(not torch.equal(found, outcome.values[0]) for found in outcome.values)
    rank = next(i for i, found in enumerate(outcome.values) if not torch.allclose(found, truth, rtol=1e-5, atol=1e-6))
    found = outcome.values[rank]

    def is_a_multiple(other: Any) -> bool:
        factor = float(found @ other) / float(other @ other)
        return factor > 0 and torch.allclose(found, other * factor, rtol=1e-4, atol=1e-6)

    means = [
        [one / max(weight, 1) for one, weight in zip(*mine, strict=True)] for mine in zip(sums, weights, strict=True)
    ]
    last = sum(mine[-1] for mine in sums) / size
    early = all_sums[rank] - sums[rank][-1]
    own_means = [mine / sum(weight) for mine, weight in zip(all_sums, weights, strict=True)]
    words = ""
    if apart and is_a_multiple(all_sums[rank]):
        words = _("the ranks hold different gradients, each its own: whether a backward reduces is decided by its "
                  "forward, so the last micro-batch's forward must not run inside no_sync")  # fmt: skip
    elif apart and _mixes(found, early, last):
        words = _("the ranks hold different gradients: only the last micro-batch's was averaged, the others' were not")
    elif apart and _mixes(found, sums[rank][-1], sum(all_sums) - sum(mine[-1] for mine in sums)):
        words = _("the ranks hold different gradients: all micro-batches but the last were averaged; it is the other "
                  "way round, all but the last run inside no_sync")  # fmt: skip
    elif not apart and is_a_multiple(sum(mine[-1] for mine in sums)):
        words = _("only the last micro-batch counts")
    elif is_a_multiple(truth):
        factor = float(found.norm() / truth.norm())
        words = _("it is {factor:.3g} times as long as it should be").format(factor=factor)
        if abs(factor - total / size) < 1e-3 * factor or abs(factor - total) < 1e-3 * factor:
            words += _(": the loss is not divided")
        elif any(abs(factor - total / (PARTS * 2 * some * size)) < 1e-3 * factor for some in (1, LENGTH)):
            words += _(": samples or places are counted, not the tokens that are valid")
        elif abs(factor - 1 / size) < 1e-3 * factor:
            words += _(": multiply by the number of ranks, by which the wrapper divides")
    elif torch.allclose(found, sum(own_means) / size, rtol=1e-4, atol=1e-6):
        words = _("each rank divides by its own tokens: divide by those of all ranks, which takes a small all-reduce")
    elif is_a_multiple(sum(sum(mine) for mine in means)):
        words = _("a mean of means: a token in a short micro-batch counts more than one in a long one")
    wanted = _("the gradient of the mean over all valid tokens, of length {length:.4f}").format(length=truth.norm())
    return Finding(False, wanted, _("rank {rank}: length {length:.4f}").format(rank=rank, length=found.norm()), words)


def _mixes(found: Any, own: Any, common: Any) -> bool:
    """Whether `found` is made of these two."""
    import torch

    basis = torch.stack([own, common], 1)
    return bool(
        (basis @ torch.linalg.lstsq(basis, found[:, None]).solution - found[:, None]).norm() < 1e-4 * found.norm()
    )


def _reduced_once(outcome: Outcome) -> Finding:
    nbytes = 4 * flat(network().parameters()).numel()
    for one in outcome.ranks:
        times = sum(span.name == "all_reduce" and span.details["bytes"] == nbytes for span in one.record.events)
        if times != 1:
            cause = _("every backward reduces: run all micro-batches but the last inside wrapper.no_sync()")
            if times == 0:
                cause = _("the gradients were not reduced together: leave it to the wrapper, in the last backward")
            measured = _("rank {rank}: {times}").format(rank=one.rank, times=times)
            return Finding(False, _("one all-reduce of all gradients"), measured, cause)
    return Finding(True)


# --- plausible, and wrong ---


def accumulates(
    wrapper: Any,
    parts: list[tuple[Any, Any]],
    factor: float,
    *,
    reduction: str = "sum",
    forward_in: int = PARTS - 1,
    backward_in: int = PARTS - 1,
) -> None:
    """Forward of the first `forward_in` micro-batches, and backward of the first `backward_in`, in no_sync."""
    from contextlib import nullcontext

    for number, part in enumerate(parts):
        with wrapper.no_sync() if number < forward_in else nullcontext():
            loss = loss_of(wrapper, part, reduction) * factor
        with wrapper.no_sync() if number < backward_in else nullcontext():
            loss.backward()


def flag_after_the_forward(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    accumulates(wrapper, micro_batches, ranks() / everyones(tokens_in(micro_batches)), forward_in=PARTS)


def divides_nothing(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    accumulates(wrapper, micro_batches, 1.0)


def sees_only_the_last(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    """A hook on the gradient gets what the last micro-batch adds, not what is there already."""
    from labkit import collectives

    module, factor = wrapper.module, ranks() / everyones(tokens_in(micro_batches))
    for part in micro_batches[:-1]:
        (loss_of(module, part) * factor).backward()

    def hook(gradient: Any) -> Any:
        averaged = gradient / ranks()
        collectives.all_reduce(averaged)
        return averaged

    handles = [parameter.register_hook(hook) for parameter in module.parameters()]
    (loss_of(module, micro_batches[-1]) * factor).backward()
    for handle in handles:
        handle.remove()


def mean_of_means(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    accumulates(wrapper, micro_batches, 1 / len(micro_batches), reduction="mean")


def divides_by_its_own(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    accumulates(wrapper, micro_batches, 1 / tokens_in(micro_batches))


def counts_places(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    accumulates(wrapper, micro_batches, 1 / sum(targets.numel() for _, targets in micro_batches))


def forgets_the_ranks(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    accumulates(wrapper, micro_batches, 1 / everyones(tokens_in(micro_batches)))


def reduces_every_time(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    accumulates(wrapper, micro_batches, ranks() / everyones(tokens_in(micro_batches)), forward_in=0, backward_in=0)


def counts_samples(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    samples = sum(len(targets) for _, targets in micro_batches)
    accumulates(wrapper, micro_batches, ranks() / everyones(samples))


def quiet_in_the_last(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    factor = ranks() / everyones(tokens_in(micro_batches))
    accumulates(wrapper, micro_batches[:-1], factor, forward_in=0, backward_in=0)
    accumulates(wrapper, micro_batches[-1:], factor)


def reduces_by_hand(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    from labkit import collectives

    factor = ranks() / everyones(tokens_in(micro_batches))
    accumulates(wrapper, micro_batches, factor, forward_in=PARTS, backward_in=PARTS)
    for parameter in wrapper.module.parameters():
        collectives.all_reduce(parameter.grad.div_(ranks()))


def clears_in_between(wrapper: Any, micro_batches: list[tuple[Any, Any]]) -> None:
    factor = ranks() / everyones(tokens_in(micro_batches))
    for part in micro_batches:
        wrapper.zero_grad()
        accumulates(wrapper, [part], factor, forward_in=0, backward_in=0)


register(
    Exercise(
        id="tokens",
        lesson="06",
        title=_("Tokens, not samples"),
        dots=3,
        minutes=15,
        answer="accumulate_tokens",
        cell="tokens-exercise",
        hints=(
            _("A target of -100 doesn't count. How many do, in all micro-batches of all ranks? That takes one small "
              "all-reduce, before the first forward."),
            _("Each loss *sum* (`ignore_index=-100, reduction=\"sum\"`) times N / that number, since the wrapper "
              "divides by N."),
            _("Forward and backward of all micro-batches but the last inside `with wrapper.no_sync():`, those of the "
              "last one outside. `contextlib.nullcontext()` is a context that does nothing."),
        ),
        properties=(
            Property("equality", _("on every rank the gradient of the mean over all valid tokens"), _equal),
            Property("reductions", _("with one reduction of the gradients"), _reduced_once),
        ),
        trials=tuple(
            Trial(
                _("{parts} micro-batches on each of {ranks} ranks").format(parts=PARTS, ranks=size),
                size, own_parts, wrapped, ("micro_batches",),
            )
            for size in (2, 3, 1)
        ),
        wrong_answers=(
            WrongAnswer("sets the flag after the forward", flag_after_the_forward, "equality", "by its forward"),
            WrongAnswer("divides nothing", divides_nothing, "equality", "the loss is not divided"),
            WrongAnswer("a hook that sees only the last", sees_only_the_last, "equality", "micro-batch's was averaged"),
            WrongAnswer("a mean of means", mean_of_means, "equality", "a mean of means"),
            WrongAnswer("divides by its own", divides_by_its_own, "equality", "by its own tokens"),
            WrongAnswer("counts places", counts_places, "equality", "not the tokens that are valid"),
            WrongAnswer("forgets the ranks", forgets_the_ranks, "equality", "multiply by the number of ranks"),
            WrongAnswer("clears in between", clears_in_between, "equality", "only the last micro-batch counts"),
            WrongAnswer("counts samples", counts_samples, "equality", "not the tokens that are valid"),
            WrongAnswer("quiet in the last one only", quiet_in_the_last, "equality", "the other way round"),
            WrongAnswer("reduces by hand", reduces_by_hand, "reductions", "leave it to the wrapper"),
            WrongAnswer("reduces every time", reduces_every_time, "reductions", "inside wrapper.no_sync()"),
        ),
    )
)  # fmt: skip
