"""Lesson 11: layers gathered just before they compute."""

from collections.abc import Callable
from typing import Any

from labkit.learn.catalog_values import drawn, rank_and_size
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent
from labkit.words import _

WIDTH, LAYERS = 12, 4


def layers_in_shards(rank: int, world_size: int) -> tuple[Any, ...]:
    """Inputs [3, WIDTH], and of each layer's matrix [WIDTH, WIDTH] this rank's rows."""
    matrices = [drawn(80 + layer, WIDTH, WIDTH) / WIDTH for layer in range(LAYERS)]
    return drawn(70, 3, WIDTH), [matrix.tensor_split(world_size)[rank].clone() for matrix in matrices]


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

    _rank, size = rank_and_size()
    whole = shard.new_empty(size * shard.shape[0], shard.shape[1])
    collectives.all_gather_into_tensor(whole, shard)
    return whole


def uses_its_shard(x: Any, shards: list[Any]) -> Any:
    """Fills up with zeros what it does not have."""
    import torch

    rank, size = rank_and_size()
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
