"""Lesson 11: a sharded optimizer, gradients scattered from hooks, and layers gathered just before they compute."""

from collections.abc import Callable
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent, equality
from labkit.words import _

STEPS, RATE, MOMENTUM = 2, 0.1, 0.9
LENGTH = 24  # elements; 1, 2, 3 and 4 ranks divide them


def _random(seed: int, *shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _here() -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


# --- shard an optimizer ---


def steps_of_one(rank: int, world_size: int) -> tuple[Any, ...]:
    """Weights, the same on all ranks, and this rank's own gradients of two steps."""
    return _random(1, LENGTH), [_random(10 * step + rank + 2, LENGTH) for step in range(STEPS)]


def sharded_steps(function: Callable[..., Any], weights: Any, gradients: list[Any]) -> Any:
    """Drive the answer for two steps with momentum of this rank's part: weights and momentum end to end."""
    import torch

    _rank, size = _here()
    weights, momentum = weights.clone(), torch.zeros(LENGTH // size)
    for gradient in gradients:
        function(weights, gradient.clone(), momentum)
    if momentum.shape != (LENGTH // size,):
        raise Nonsense(describe(momentum), _("momentum of the shape that was given, changed in place"))
    return torch.cat([weights, momentum])


def _stepped(
    outcome: Outcome, divisor: float | None = None, *, own: bool = False, fresh: float = 1.0, plain: bool = False
) -> list[Any]:
    """What each rank should have; or with its `own` gradients only, with `fresh` times the gradient in the momentum,
    or with weights that lose the `plain` gradient."""
    import torch

    size = outcome.world_size
    weights, momentum = outcome.inputs(0)[0].clone(), torch.zeros(LENGTH)
    for step in range(STEPS):
        gradients = [outcome.inputs(rank)[1][step] for rank in range(size)]
        mean = sum(gradients) / (size if divisor is None else divisor)
        if own:
            n = LENGTH // size
            mean = torch.cat([gradients[rank][rank * n : (rank + 1) * n] for rank in range(size)])
        momentum = MOMENTUM * momentum + fresh * mean
        weights = weights - RATE * (mean if plain else momentum)
    return [torch.cat([weights, part]) for part in momentum.split(LENGTH // size)]


def _step_cause(outcome: Outcome, rank: int) -> str:
    import torch

    found, size = outcome.ranks[rank].value, outcome.world_size
    begin = outcome.inputs(0)[0]
    part = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    if size > 1 and torch.allclose(found, _stepped(outcome, 1)[rank], atol=1e-5):
        return _("the gradients are summed: divide by the number of ranks")
    if size > 1 and torch.allclose(found, _stepped(outcome, own=True)[rank], atol=1e-5):
        return _("each rank has used its own gradient only: the mean is over all ranks")
    if torch.allclose(found, _stepped(outcome, fresh=1 - MOMENTUM)[rank], atol=1e-5):
        return _("the momentum takes the whole gradient, not a tenth of it")
    if torch.allclose(found, _stepped(outcome, plain=True)[rank], atol=1e-5):
        return _("the weights lose 0.1 times the momentum, not the gradient")
    if torch.allclose(found[:LENGTH], begin):
        return _("the weights are as they were: step this rank's part of them, in place")
    rest = torch.ones(LENGTH, dtype=torch.bool)
    rest[part] = False
    if size > 1 and torch.equal(found[:LENGTH][rest], begin[rest]):
        return _("only this rank's part has been stepped: the others' parts have to be gathered")
    if not found[LENGTH:].any():
        return _("the momentum is zero still: change it in place, it is needed in the next step")
    return ""


def _all_gather_and_reduce(outcome: Outcome, rank: int) -> float:
    size = outcome.world_size
    return STEPS * 2 * 4 * LENGTH * (size - 1) / size


def _step_bytes_cause(outcome: Outcome, rank: int) -> str:
    size = outcome.world_size
    sent = outcome.ranks[rank].record.bytes_sent
    if sent == STEPS * 3 * 4 * LENGTH * (size - 1) / size:
        return _("an all-reduce is a reduce-scatter and an all-gather: its second half is not needed here")
    return ""


def _update(weights: Any, gradient: Any, momentum: Any, rank: int) -> None:
    momentum.mul_(MOMENTUM).add_(gradient)
    part = weights[rank * len(momentum) : (rank + 1) * len(momentum)]
    part.sub_(RATE * momentum)


def _gather(weights: Any, momentum: Any, rank: int) -> None:
    from labkit import collectives

    part = weights[rank * len(momentum) : (rank + 1) * len(momentum)]
    collectives.all_gather_into_tensor(weights, part.clone())


def all_reduces(weights: Any, gradient: Any, momentum: Any) -> None:
    """Right, and half as many bytes again: what plain data parallel with a sharded optimizer does."""
    from labkit import collectives

    rank, size = _here()
    collectives.all_reduce(gradient)
    own = gradient.view(size, -1)[rank] / size
    _update(weights, own, momentum, rank)
    _gather(weights, momentum, rank)


def sums(weights: Any, gradient: Any, momentum: Any) -> None:
    import torch

    from labkit import collectives

    rank, _size = _here()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient)
    _update(weights, own, momentum, rank)
    _gather(weights, momentum, rank)


def forgets_to_gather(weights: Any, gradient: Any, momentum: Any) -> None:
    import torch

    from labkit import collectives

    rank, size = _here()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient / size)
    _update(weights, own, momentum, rank)


def uses_its_own_gradient(weights: Any, gradient: Any, momentum: Any) -> None:
    rank, size = _here()
    _update(weights, gradient.view(size, -1)[rank], momentum, rank)
    _gather(weights, momentum, rank)


def averages_over_time(weights: Any, gradient: Any, momentum: Any) -> None:
    """A moving average, as Adam's first moment is."""
    import torch

    from labkit import collectives

    rank, size = _here()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient / size)
    _update(weights, (1 - MOMENTUM) * own, momentum, rank)
    _gather(weights, momentum, rank)


def steps_by_the_gradient(weights: Any, gradient: Any, momentum: Any) -> None:
    import torch

    from labkit import collectives

    rank, size = _here()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient / size)
    momentum.mul_(MOMENTUM).add_(own)
    weights[rank * len(momentum) : (rank + 1) * len(momentum)].sub_(RATE * own)
    _gather(weights, momentum, rank)


def momentum_of_its_own(weights: Any, gradient: Any, momentum: Any) -> None:
    """The argument is bound anew, and the caller's stays zero."""
    import torch

    from labkit import collectives

    rank, size = _here()
    own = torch.empty_like(momentum)
    collectives.reduce_scatter_tensor(own, gradient / size)
    _update(weights, own, momentum.clone(), rank)
    _gather(weights, momentum, rank)


register(
    Exercise(
        id="sharded-step",
        lesson="11",
        title=_("Shard an optimizer"),
        dots=2,
        minutes=12,
        answer="sharded_step",
        hints=(
            _("Three calls: reduce-scatter the gradient, step this rank's part, gather the parts."),
            _("`collectives.reduce_scatter_tensor(own, gradient)` sums part r of all ranks into rank r's `own`. A mean "
              "is wanted."),
            _("This rank's part of the weights is `weights[rank * n : (rank + 1) * n]`, n = len(momentum); a view, so "
              "`sub_` changes the weights. Then `collectives.all_gather_into_tensor(weights, part)`."),
        ),
        properties=(
            equality(
                lambda outcome: _stepped(outcome),
                statement=_("weights and momentum are those of SGD with the mean gradient"),
                cause=_step_cause,
            ),
            bytes_sent(
                _all_gather_and_reduce,
                statement=_("a step sends 2 K (N - 1) / N elements of K"),
                cause=_step_bytes_cause,
            ),
        ),
        trials=tuple(
            Trial(_("2 steps on {ranks} ranks").format(ranks=ranks), ranks, steps_of_one, sharded_steps)
            for ranks in (1, 2, 3)
        ),
        wrong_answers=(
            WrongAnswer("all-reduces the gradient", all_reduces, "bytes", "second half is not needed"),
            WrongAnswer("sums the gradients", sums, "equality", "divide by the number of ranks"),
            WrongAnswer("forgets to gather", forgets_to_gather, "equality", "have to be gathered"),
            WrongAnswer("keeps a momentum of its own", momentum_of_its_own, "equality", "change it in place"),
            WrongAnswer("uses its own gradient", uses_its_own_gradient, "equality", "its own gradient only"),
            WrongAnswer("averages over time", averages_over_time, "equality", "not a tenth"),
            WrongAnswer("steps by the gradient", steps_by_the_gradient, "equality", "not the gradient"),
        ),
    )
)  # fmt: skip


# --- reduce-scatter in the hook ---

SHAPES = ((6, 4), (12,), (4, 6))  # 6 x 4 in, whatever the world size divides


def small_network() -> Any:
    """Two layers and a bias, sizes that 1 to 4 ranks divide."""
    import torch
    from torch import nn

    module: Any = nn.Module()
    for name, shape in zip(("first", "bias", "last"), SHAPES, strict=True):
        module.register_parameter(name, nn.Parameter(_random(len(name), *shape)))

    def forward(x: Any) -> Any:
        return torch.tanh(x @ module.first.view(4, 6)) @ module.last.view(6, 4) + module.bias[:4]

    module.forward = forward
    return module


def rows_of_rank(rank: int, world_size: int) -> tuple[Any, ...]:
    """This rank's share of the batch [3, 4]."""
    return (_random(50 + rank, 3, 4),)


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

    _rank, size = _here()
    shard = gradient.new_empty(len(gradient) // size)
    collectives.reduce_scatter_tensor(shard, gradient / divisor)
    return shard


def never_frees(module: Any) -> Any:
    return _hooked(module, lambda gradient: _reduced(gradient, _here()[1]), frees=False)


def scatters_sums(module: Any) -> Any:
    return _hooked(module, lambda gradient: _reduced(gradient, 1))


def _all_reduced(gradient: Any) -> Any:
    from labkit import collectives

    collectives.all_reduce(gradient)
    return gradient / _here()[1]


def all_reduces_and_cuts(module: Any) -> Any:
    return _hooked(module, lambda gradient: _all_reduced(gradient).view(_here()[1], -1)[_here()[0]])


def keeps_its_own_part(module: Any) -> Any:
    """Nothing is sent."""
    return _hooked(module, lambda gradient: (gradient / _here()[1]).view(_here()[1], -1)[_here()[0]].clone())


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


# --- gather and free around a layer ---

WIDTH, LAYERS = 12, 4


def layers_in_shards(rank: int, world_size: int) -> tuple[Any, ...]:
    """Inputs [3, WIDTH], and of each layer's matrix [WIDTH, WIDTH] this rank's rows."""
    matrices = [_random(80 + layer, WIDTH, WIDTH) / WIDTH for layer in range(LAYERS)]
    return _random(70, 3, WIDTH), [matrix.tensor_split(world_size)[rank].clone() for matrix in matrices]


def watched_forward(function: Callable[..., Any], x: Any, shards: list[Any]) -> Any:
    """Drive the answer while counting the gathered matrices that are alive at each gather."""
    import weakref

    import torch

    from labkit import collectives as imported

    collectives: Any = imported
    gathered: list[Any] = []
    most = 0
    original = collectives.all_gather_into_tensor

    def watched(output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        result = original(output, *args, **kwargs)
        storage = output.untyped_storage()
        gathered.append(weakref.ref(storage))
        alive = {id(one): one for one in (reference() for reference in gathered) if one is not None}
        most = max(most, sum(one.nbytes() for one in alive.values()))
        return result

    collectives.all_gather_into_tensor = watched
    try:
        with torch.no_grad():
            output = function(x, [shard.clone() for shard in shards])
    finally:
        collectives.all_gather_into_tensor = original
    if not isinstance(output, torch.Tensor):
        raise Nonsense(describe(output), _("the output, a tensor"))
    return most, output


def _network_output(outcome: Outcome, *, bent: bool = True) -> Any:
    import torch

    x = outcome.inputs(0)[0]
    for layer in range(LAYERS):
        matrix = torch.cat([outcome.inputs(rank)[1][layer] for rank in range(outcome.world_size)])
        x = torch.tanh(x @ matrix.T) if bent else x @ matrix.T
    return x


def _right_output(outcome: Outcome) -> Finding:
    import torch

    right = _network_output(outcome)
    for rank, (_most, found) in enumerate(outcome.values):
        if found.shape == right.shape and torch.allclose(found, right, atol=1e-5):
            continue
        cause = ""
        if found.shape != right.shape:
            cause = _("with a shard alone a layer has only a part of its outputs: gather the matrix first")
        elif torch.allclose(found, _network_output(outcome, bent=False), atol=1e-5):
            cause = _("the tanh is missing")
        elif outcome.world_size > 1:
            cause = _("are the rows in the order of the ranks, and the matrix transposed?")
        wanted = _("the output of all {n} layers").format(n=LAYERS)
        return Finding(False, wanted, _("rank {rank}: another one").format(rank=rank), cause)
    return Finding(True)


def _one_at_a_time(outcome: Outcome) -> Finding:
    one = 4 * WIDTH * WIDTH
    for rank, (most, _found) in enumerate(outcome.values):
        if most > one:
            wanted = _("{n} bytes of gathered matrices at a time").format(n=one)
            measured = _("rank {rank}: {n} bytes").format(rank=rank, n=most)
            cause = _("gathered matrices outlive their layer: keep none in a list or attribute")
            return Finding(False, wanted, measured, cause)
    return Finding(True)


def _gathers(outcome: Outcome, rank: int) -> float:
    return LAYERS * 4 * WIDTH * WIDTH * (outcome.world_size - 1) / outcome.world_size


def gathers_all_first(x: Any, shards: list[Any]) -> Any:
    import torch

    wholes = [_whole(shard) for shard in shards]
    for whole in wholes:
        x = torch.tanh(x @ whole.T)
    return x


def _whole(shard: Any) -> Any:
    from labkit import collectives

    _rank, size = _here()
    whole = shard.new_empty(size * shard.shape[0], shard.shape[1])
    collectives.all_gather_into_tensor(whole, shard)
    return whole


def uses_its_shard(x: Any, shards: list[Any]) -> Any:
    """Fills up with zeros what it does not have."""
    import torch

    rank, size = _here()
    for shard in shards:
        whole = shard.new_zeros(size * shard.shape[0], shard.shape[1])
        whole[rank * shard.shape[0] : (rank + 1) * shard.shape[0]] = shard
        x = torch.tanh(x @ whole.T)
    return x


def never_transposes(x: Any, shards: list[Any]) -> Any:
    import torch

    for shard in shards:
        x = torch.tanh(x @ _whole(shard))
    return x


def forgets_the_tanh(x: Any, shards: list[Any]) -> Any:
    for shard in shards:
        x = x @ _whole(shard).T
    return x


def gathers_twice(x: Any, shards: list[Any]) -> Any:
    """Before the layer, and once more for nothing."""
    import torch

    for shard in shards:
        x = torch.tanh(x @ _whole(shard).T)
        _whole(shard)
    return x


register(
    Exercise(
        id="gather-free",
        lesson="11",
        title=_("Gather and free around a layer"),
        dots=1,
        minutes=10,
        answer="through_layers",
        hints=(
            _("For each layer: make room for the whole matrix, gather it, compute, let it go."),
            _("`whole = torch.empty(N * rows, columns)`, then `collectives.all_gather_into_tensor(whole, shard)`; the "
              "layer is `torch.tanh(x @ whole.T)`."),
            _("A name that is bound anew in the next turn lets go of the matrix before. A list does not."),
        ),
        properties=(
            Property("equality", _("the output is that of the whole layers"), _right_output),
            bytes_sent(_gathers, statement=_("each matrix is gathered once")),
            Property("memory", _("one gathered matrix is alive at a time"), _one_at_a_time),
        ),
        trials=tuple(
            Trial(_("4 layers, {ranks} ranks").format(ranks=ranks), ranks, layers_in_shards, watched_forward)
            for ranks in (2, 3)
        ),
        wrong_answers=(
            WrongAnswer("gathers all first", gathers_all_first, "memory", "outlive their layer"),
            WrongAnswer("uses its shard alone", uses_its_shard, "equality", "order of the ranks"),
            WrongAnswer("forgets the transpose", never_transposes, "equality", "transposed"),
            WrongAnswer("forgets the tanh", forgets_the_tanh, "equality", "tanh is missing"),
            WrongAnswer("gathers twice", gathers_twice, "bytes", "2 times"),
        ),
    )
)  # fmt: skip
