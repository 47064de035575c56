"""Lesson 04: gradients averaged from hooks, and gradients averaged in buckets."""

from collections.abc import Callable
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent, equality, messages
from labkit.words import _

STEPS = 2


# --- write the hook ---


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
    import torch

    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def own_rows(rank: int, world_size: int) -> tuple[Any, ...]:
    """This rank's share of the batch [2 N, 5], other rows on every rank."""
    import torch

    return (torch.randn(2, 5, generator=torch.Generator().manual_seed(40 + rank)),)


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


def _all_reduces(outcome: Outcome, rank: int, what: str, lengths: list[int], times: int) -> int:
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
                lambda outcome, rank: _all_reduces(outcome, rank, "messages", _counts(), STEPS),
                statement=_("by one all-reduce for each trained parameter"),
                cause=lambda outcome, rank: _more_messages(outcome, rank),
            ),
            bytes_sent(
                lambda outcome, rank: _all_reduces(outcome, rank, "bytes", _counts(), STEPS),
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
    wanted = _all_reduces(outcome, rank, "messages", _counts(), STEPS)
    if outcome.ranks[rank].record.messages > wanted:
        return _("a hook is called for each parameter: more than one all-reduce in it is too many")
    return ""


# --- write a bucket ---

#: 48, 4, 44, 4, 44 and 8 bytes: filled from the last, buckets of 48 bytes are three, from the first four
SHAPES = ((4, 3), (1,), (11,), (1,), (11,), (2,))
CAPS = (1, 48, 10_000)


def own_gradients(rank: int, world_size: int) -> tuple[Any, ...]:
    """Gradients in the order of the parameters."""
    import torch

    random = torch.Generator().manual_seed(70 + rank)
    return ([torch.randn(shape, generator=random) for shape in SHAPES],)


def with_cap(function: Callable[..., Any], gradients: list[Any], *, cap: int) -> Any:
    """Drive the answer on copies, and return them flat."""
    mine = [gradient.clone() for gradient in gradients]
    function(mine, cap)
    return flat(mine)


def with_cap_1(function: Callable[..., Any], gradients: list[Any]) -> Any:
    return with_cap(function, gradients, cap=CAPS[0])


def with_cap_48(function: Callable[..., Any], gradients: list[Any]) -> Any:
    return with_cap(function, gradients, cap=CAPS[1])


def with_cap_10_000(function: Callable[..., Any], gradients: list[Any]) -> Any:
    return with_cap(function, gradients, cap=CAPS[2])


DRIVES = dict(zip(CAPS, (with_cap_1, with_cap_48, with_cap_10_000), strict=True))


def _means(outcome: Outcome) -> list[Any]:
    size = outcome.world_size
    everyones = [flat(outcome.inputs(rank)[0]) for rank in range(size)]
    return [sum(everyones) / size] * size


def filled(lengths: list[int], cap: int, *, closes_before: bool = False) -> list[list[int]]:
    """Places of the gradients in each bucket, from the last to the first."""
    buckets: list[list[int]] = [[]]
    held = 0
    for place in reversed(range(len(lengths))):
        size = 4 * lengths[place]
        if closes_before and buckets[-1] and held + size > cap:
            buckets.append([])
            held = 0
        buckets[-1].append(place)
        held += size
        if not closes_before and held >= cap:
            buckets.append([])
            held = 0
    return [bucket for bucket in buckets if bucket]


def _lengths() -> list[int]:
    import math

    return [math.prod(shape) for shape in SHAPES]


def _cap(outcome: Outcome) -> int:
    return next(cap for cap, drive in DRIVES.items() if drive is outcome.trial.drive)


def _in_buckets(outcome: Outcome, rank: int, what: str) -> int:
    lengths = _lengths()
    sizes = [sum(lengths[place] for place in bucket) for bucket in filled(lengths, _cap(outcome))]
    return _all_reduces(outcome, rank, what, sizes, 1)


def _bucket_cause(outcome: Outcome, rank: int) -> str:
    sent, wanted = outcome.ranks[rank].record.messages, _in_buckets(outcome, rank, "messages")
    each = _all_reduces(outcome, rank, "messages", _lengths(), 1)
    if sent == each != wanted:
        return _("every gradient travels alone: cap_bytes is not used")
    if sent == _all_reduces(outcome, rank, "messages", [sum(_lengths())], 1) != wanted:
        return _("all travel together: cap_bytes is not used")
    if sent and sent != wanted:
        return _("the buckets are cut elsewhere: go from the last gradient to the first, and close a bucket as soon as "
                 "it holds cap_bytes or more")  # fmt: skip
    return ""


def _order_cause(outcome: Outcome, rank: int) -> str:
    import torch

    found, wanted = outcome.ranks[rank].value, _means(outcome)[rank]
    if torch.allclose(found.sort().values, wanted.sort().values, rtol=1e-4, atol=1e-6):
        return _("the numbers are right and their places are not: split the flat tensor in the order in which you "
                 "joined it")  # fmt: skip
    if outcome.world_size > 1 and not outcome.ranks[rank].record.messages:
        return _("nothing is sent: is the last bucket sent, which may not be full?")
    if torch.equal(found, flat(outcome.inputs(rank)[0])):
        return _("nothing came back from the flat tensor: torch.cat makes a copy, so copy the parts back")
    right = torch.isclose(found, wanted, rtol=1e-4, atol=1e-6)
    if right.any() and not right.all():
        return _("some gradients are right, others are not: is the last bucket sent, which may not be full?")
    return ""


def _send(
    gradients: list[Any], bucket: list[int], *, divide: bool = True, back: bool = True, turn: bool = False
) -> None:
    import torch
    import torch.distributed as dist

    from labkit import collectives

    together = torch.cat([gradients[place].flatten() for place in bucket])
    collectives.all_reduce(together)
    if divide:
        together /= dist.get_world_size()
    if back:
        places = bucket[::-1] if turn else bucket
        for place, part in zip(places, together.split([gradients[p].numel() for p in places]), strict=True):
            gradients[place].copy_(part.view_as(gradients[place]))


def _buckets_of(gradients: list[Any], cap: int, **options: Any) -> list[list[int]]:
    return filled([gradient.numel() for gradient in gradients], cap, **options)


def one_by_one(gradients: list[Any], cap_bytes: int) -> None:
    for place in reversed(range(len(gradients))):
        _send(gradients, [place])


def all_together(gradients: list[Any], cap_bytes: int) -> None:
    _send(gradients, list(reversed(range(len(gradients)))))


def loses_the_last_bucket(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes):
        if sum(4 * gradients[place].numel() for place in bucket) >= cap_bytes:
            _send(gradients, bucket)


def copies_nothing_back(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes):
        _send(gradients, bucket, back=False)


def copies_back_in_another_order(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes):
        _send(gradients, bucket, turn=True)


def sums_in_buckets(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes):
        _send(gradients, bucket, divide=False)


def closes_too_early(gradients: list[Any], cap_bytes: int) -> None:
    for bucket in _buckets_of(gradients, cap_bytes, closes_before=True):
        _send(gradients, bucket)


def fills_from_the_first(gradients: list[Any], cap_bytes: int) -> None:
    turned = gradients[::-1]
    for bucket in _buckets_of(turned, cap_bytes):
        _send(turned, bucket)


register(
    Exercise(
        id="bucket",
        lesson="04",
        title=_("Write a bucket"),
        dots=2,
        minutes=15,
        answer="average_in_buckets",
        hints=(
            _("Go through `reversed(gradients)` with a list and a count of bytes. When the count reaches `cap_bytes`, "
              "send what the list holds and begin a new one. What is left at the end?"),
            _("To send: `torch.cat([g.flatten() for g in bucket])` makes one flat tensor of them; one all-reduce; "
              "divide by the number of ranks."),
            _("`flat.split([g.numel() for g in bucket])` gives the parts back in the order of the bucket: "
              "`g.copy_(part.view_as(g))`."),
        ),
        properties=(
            equality(
                _means,
                statement=_("every gradient is the mean over all ranks, in its own place"),
                cause=_order_cause,
            ),
            messages(
                lambda outcome, rank: _in_buckets(outcome, rank, "messages"),
                statement=_("by one all-reduce a bucket, closed when it holds cap_bytes or more"),
                cause=_bucket_cause,
            ),
            bytes_sent(
                lambda outcome, rank: _in_buckets(outcome, rank, "bytes"),
                statement=_("of the bucket's gradients, from the last to the first"),
                cause=_bucket_cause,
            ),
        ),
        trials=tuple(
            Trial(
                _("buckets of {cap} bytes, {ranks} ranks").format(cap=cap, ranks=ranks),
                ranks,
                own_gradients,
                DRIVES[cap],
                ("gradients",),
            )
            for ranks in (1, 2, 3)
            for cap in CAPS
        ),
        wrong_answers=(
            WrongAnswer("one by one", one_by_one, "messages", "travels alone"),
            WrongAnswer("all together", all_together, "messages", "all travel together"),
            WrongAnswer("loses the last bucket", loses_the_last_bucket, "equality", "is the last bucket sent"),
            WrongAnswer("copies nothing back", copies_nothing_back, "equality", "copy the parts back"),
            WrongAnswer("copies back in another order", copies_back_in_another_order, "equality", "their places"),
            WrongAnswer("sums", sums_in_buckets, "equality", "summed where an average is wanted"),
            WrongAnswer("closes a bucket too early", closes_too_early, "messages", "cut elsewhere"),
            WrongAnswer("fills from the first", fills_from_the_first, "messages", "cut elsewhere"),
        ),
    )
)  # fmt: skip
