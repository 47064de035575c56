"""Lesson 03: the ring all-reduce, all-gather by a ring, and where the tree and the ring take the same time."""

import math
from collections.abc import Callable
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, bytes_sent, equality, messages
from labkit.words import _

ITEMSIZE = 4  # float32


def own_values(rank: int, length: int) -> Any:
    """What a rank contributes: float32 [length], other numbers on every rank."""
    import torch

    return torch.randn(length, generator=torch.Generator().manual_seed(100 + rank))


def twelve(rank: int, world_size: int) -> tuple[Any, ...]:
    return (own_values(rank, 12),)


def seven(rank: int, world_size: int) -> tuple[Any, ...]:
    return (own_values(rank, 7),)


def in_place(function: Callable[..., Any], tensor: Any) -> Any:
    """Drive an answer that works in place, on a copy."""
    mine = tensor.clone()
    function(mine)
    return mine


def returned(function: Callable[..., Any], tensor: Any) -> Any:
    """Drive an answer that returns a tensor."""
    import torch

    value = function(tensor)
    if not isinstance(value, torch.Tensor):
        raise Nonsense(describe(value), _("a tensor"))
    return value


def _contributions(outcome: Outcome) -> list[Any]:
    return [outcome.inputs(rank)[0] for rank in range(outcome.world_size)]


def _sums(outcome: Outcome) -> list[Any]:
    total = sum(_contributions(outcome))
    return [total] * outcome.world_size


def _gathered(outcome: Outcome) -> list[Any]:
    import torch

    return [torch.cat(_contributions(outcome))] * outcome.world_size


def _length(outcome: Outcome) -> int:
    return len(outcome.inputs(0)[0])


def _ring_bytes(outcome: Outcome) -> Finding:
    """Per rank where N divides the length; elsewhere in sum, since which chunks are longer is the learner's choice."""
    size, length = outcome.world_size, _length(outcome)
    total = 2 * (size - 1) * length * ITEMSIZE
    sent = [one.record.bytes_sent for one in outcome.ranks]
    uneven = length % size == 0 and len(set(sent)) > 1
    if sum(sent) == total and not uneven:
        return Finding(True)
    wanted = _("{bytes} bytes from all ranks together, 2 (N - 1) / N of the tensor from each").format(bytes=total)
    measured = _("{bytes} bytes, by rank: {each}").format(bytes=sum(sent), each=", ".join(map(str, sent)))
    return Finding(False, wanted, measured, _ring_cause(sum(sent), total, uneven))


def _ring_cause(sent: int, total: int, uneven: bool) -> str:
    if sent == 0:
        return _("nothing went through labkit.collectives, which is where it is counted")
    if uneven and sent == total:
        return _("one rank sends more than the others: it is a gather and a broadcast, not a ring")
    if sent * 2 == total * 4:
        return _("the whole tensor goes round in both phases: a step passes on one chunk, 1 / N of it")
    if sent > total:
        return _("whole tensors travel where one chunk, 1 / N of the tensor, would do")
    return _("a part is never sent: are there N - 1 steps in each phase?")


def _flow(values: Any) -> tuple[int, int, list[Any]]:
    import torch.distributed as dist

    size, me = dist.get_world_size(), dist.get_rank()
    return size, me, list(values.tensor_split(size))


def _swap(outgoing: Any, incoming: Any) -> None:
    import torch.distributed as dist

    from labkit import collectives

    size, me = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    receiving = collectives.irecv(incoming, (me - 1) % size)
    collectives.isend(outgoing, (me + 1) % size).wait()
    receiving.wait()


def passes_whole_tensors(tensor: Any) -> None:
    """Three times the tensor at N = 4."""
    size, _me, _chunks = _flow(tensor)
    passing = tensor.clone()
    for _step in range(size - 1):
        arrived = passing.clone()
        _swap(passing, arrived)
        tensor += arrived
        passing = arrived


def passes_whole_tensors_in_both_phases(tensor: Any) -> None:
    """Six times the tensor at N = 4."""
    passes_whole_tensors(tensor)
    size, _me, _chunks = _flow(tensor)
    for _step in range(size - 1):
        _swap(tensor.clone(), tensor)


def gathers_at_rank_zero(tensor: Any) -> None:
    import torch.distributed as dist

    from labkit import collectives

    size, me = dist.get_world_size(), dist.get_rank()
    if me:
        collectives.send(tensor, 0)
        collectives.recv(tensor, 0)
        return
    part = tensor.clone()
    for rank in range(1, size):
        collectives.recv(part, rank)
        tensor += part
    for rank in range(1, size):
        collectives.send(tensor, rank)


def _ring(tensor: Any, *, first_phase: int = 0, gather_from: int = 1, scale: float = 1.0) -> None:
    size, me, chunks = _flow(tensor)
    for step in range(size - 1 + first_phase):
        incoming = chunks[(me - step - 1) % size]
        arrived = incoming.clone()
        _swap(chunks[(me - step) % size], arrived)
        incoming += arrived
    tensor *= scale
    for step in range(size - 1):
        _swap(chunks[(me + gather_from - step) % size], chunks[(me + gather_from - step - 1) % size])


def stops_a_step_early(tensor: Any) -> None:
    _ring(tensor, first_phase=-1)


def gathers_the_wrong_chunk(tensor: Any) -> None:
    _ring(tensor, gather_from=0)


def averages(tensor: Any) -> None:
    _ring(tensor, scale=1 / _flow(tensor)[0])


def drops_the_remainder(tensor: Any) -> None:
    size = _flow(tensor)[0]
    whole = len(tensor) // size * size
    _ring(tensor[:whole])


RING_TRIALS = tuple(
    Trial(
        _("{length} elements on {ranks} ranks").format(length=length, ranks=ranks), ranks, make, in_place, ("tensor",)
    )
    for ranks in (1, 2, 3, 4)
    for length, make in ((12, twelve), (7, seven))
)

register(
    Exercise(
        id="ring",
        lesson="03",
        title=_("Write the ring"),
        dots=3,
        minutes=25,
        answer="ring",
        hints=(
            _("Two phases of N - 1 steps. In each step a rank sends one chunk to the next rank and receives another "
              "from the one before. `tensor.tensor_split(N)` gives the chunks as views."),
            _("First phase: in step s send chunk `(rank - s) % N`, receive into a spare tensor, and add it to chunk "
              "`(rank - s - 1) % N`. Which chunk is complete on your rank after it?"),
            _("Second phase: chunk `(rank + 1) % N` is complete. In step s send chunk `(rank + 1 - s) % N` and receive "
              "chunk `(rank - s) % N`; nothing is added. Start the receive with `irecv` before you wait for the send."),
        ),
        properties=(
            equality(_sums, statement=_("every rank holds the sum of all ranks' tensors")),
            Property("bytes", _("each rank sends 2 (N - 1) / N of the tensor"), _ring_bytes),
            messages(lambda outcome, rank: 2 * (outcome.world_size - 1), statement=_("in 2 (N - 1) messages")),
        ),
        trials=RING_TRIALS,
        wrong_answers=(
            WrongAnswer("passes whole tensors round", passes_whole_tensors, "bytes", "whole tensors travel"),
            WrongAnswer("whole tensors in both phases", passes_whole_tensors_in_both_phases, "bytes", "both phases"),
            WrongAnswer("gathers at rank 0", gathers_at_rank_zero, "bytes", "gather and a broadcast"),
            WrongAnswer("stops a step early", stops_a_step_early, "equality", ""),
            WrongAnswer("gathers the wrong chunk", gathers_the_wrong_chunk, "equality", ""),
            WrongAnswer("averages", averages, "equality", "too small"),
            WrongAnswer("drops the remainder", drops_the_remainder, "equality", ""),
        ),
    )
)  # fmt: skip


def gathers_in_arriving_order(piece: Any) -> Any:
    import torch

    size = _flow(piece)[0]
    found, passing = [piece], piece
    for _step in range(size - 1):
        arrived = passing.clone()
        _swap(passing, arrived)
        found.append(arrived)
        passing = arrived
    return torch.cat(found)


def sends_its_own_piece_every_time(piece: Any) -> Any:
    import torch

    size, me, _chunks = _flow(piece)
    parts = [piece] * size
    for step in range(size - 1):
        arrived = piece.clone()
        _swap(piece, arrived)
        parts[(me - step - 1) % size] = arrived
    return torch.cat(parts)


def passes_everything_found(piece: Any) -> Any:
    import torch

    size, me, _chunks = _flow(piece)
    parts = torch.zeros(size, len(piece))
    parts[me] = piece
    for _step in range(size - 1):
        arrived = parts.clone()
        _swap(parts, arrived)
        parts = torch.where(parts != 0, parts, arrived)
    return parts.flatten()


def keeps_only_its_own(piece: Any) -> Any:
    return piece.repeat(_flow(piece)[0])


register(
    Exercise(
        id="ring-gather",
        lesson="03",
        title=_("All-gather by a ring"),
        dots=2,
        minutes=12,
        answer="ring_gather",
        hints=(
            _("Only the ring's second phase: N - 1 steps, nothing is added."),
            _("In each step pass on what you received in the step before; in the first step your own piece."),
            _("What arrives in step s started on rank `(rank - s - 1) % N`: that is its place in the result."),
        ),
        properties=(
            equality(_gathered, statement=_("every rank holds all pieces, in rank order")),
            bytes_sent(
                lambda outcome, rank: (outcome.world_size - 1) * _length(outcome) * ITEMSIZE,
                statement=_("each rank sends N - 1 pieces"),
            ),
            messages(lambda outcome, rank: outcome.world_size - 1, statement=_("in N - 1 messages")),
        ),
        trials=tuple(
            Trial(_("pieces of 7 on {ranks} ranks").format(ranks=ranks), ranks, seven, returned, ("piece",))
            for ranks in (1, 2, 3, 4)
        ),
        wrong_answers=(
            WrongAnswer("in the order of arrival", gathers_in_arriving_order, "equality", ""),
            WrongAnswer("sends its own piece every time", sends_its_own_piece_every_time, "equality", ""),
            WrongAnswer("passes on everything it has", passes_everything_found, "bytes", "times what is needed"),
            WrongAnswer("keeps only its own", keeps_only_its_own, "equality", ""),
        ),
    )
)  # fmt: skip


CASES = tuple(
    (alpha, beta, size) for size in (4, 8, 64) for alpha, beta in ((50e-6, 8e-9), (5e-6, 8e-11), (1e-3, 1e-8))
)


def all_crossovers(function: Callable[..., Any]) -> list[float]:
    """The answer's sizes in bytes for all cases."""
    found = []
    for alpha, beta, size in CASES:
        value = function(alpha, beta, size)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Nonsense(describe(value), _("a number of bytes"))
        found.append(float(value))
    return found


def _ring_seconds(n: float, alpha: float, beta: float, size: int) -> float:
    return 2 * (size - 1) * (alpha + n / size * beta)


def _tree_seconds(n: float, alpha: float, beta: float, size: int) -> float:
    return 2 * math.log2(size) * (alpha + n * beta)


def _same_time(outcome: Outcome) -> Finding:
    for (alpha, beta, size), n in zip(CASES, outcome.values[0], strict=True):
        ring, tree = _ring_seconds(n, alpha, beta, size), _tree_seconds(n, alpha, beta, size)
        if not (n > 0 and math.isclose(ring, tree, rel_tol=1e-6)):
            wanted = _("a size at which both take the same time")
            text = _("{n:.4g} bytes on {size} ranks: ring {ring:.3g} s, tree {tree:.3g} s")
            return Finding(
                False, wanted, text.format(n=n, size=size, ring=ring, tree=tree), _crossing(n, alpha, beta, size)
            )
    return Finding(True)


def _crossing(n: float, alpha: float, beta: float, size: int) -> str:
    rounds = math.log2(size)
    right = alpha * (size - 1 - rounds) / (beta * (rounds - (size - 1) / size))
    if n <= 0:
        return _("a size below zero: which of the two has more messages, and which more bytes?")
    if math.isclose(n, 8 * right, rel_tol=1e-6) or math.isclose(n, right / 8, rel_tol=1e-6):
        return _("off by 8: beta is seconds a byte here, not a bit")
    if math.isclose(
        n, alpha * (size - 1 - math.log(size)) / (beta * (math.log(size) - (size - 1) / size)), rel_tol=1e-6
    ):
        return _("the tree has log2 N rounds each way: log to base 2")
    if math.isclose(n, alpha / beta, rel_tol=1e-6):
        return _(
            "that is where latency and bandwidth cost the same in one message; write down both times and equate them"
        )
    if n > right:
        return _("the ring sends 1 / N of the tensor in a step, the tree all of it: is one of them too cheap?")
    return ""


def latency_equals_bandwidth(alpha: float, beta: float, size: int) -> float:
    return alpha / beta


def natural_logarithm(alpha: float, beta: float, size: int) -> float:
    return alpha * (size - 1 - math.log(size)) / (beta * (math.log(size) - (size - 1) / size))


def counts_bits(alpha: float, beta: float, size: int) -> float:
    rounds = math.log2(size)
    return 8 * alpha * (size - 1 - rounds) / (beta * (rounds - (size - 1) / size))


def ring_sends_whole_tensors(alpha: float, beta: float, size: int) -> float:
    rounds = math.log2(size)
    return alpha * (size - 1 - rounds) / (beta * (rounds - (size - 1)))


register(
    Exercise(
        id="crossover",
        lesson="03",
        title=_("Where the ring overtakes the tree"),
        dots=2,
        minutes=10,
        answer="crossover",
        hints=(
            _("Write down both times. A message of m bytes takes alpha + m beta."),
            _("Ring: 2 (N - 1) messages of n / N bytes, one after the other. Tree: log2 N messages up and as many "
              "down, of n bytes each."),
            _("Set the two equal and solve for n: alpha (N - 1 - log2 N) = n beta (log2 N - (N - 1) / N)."),
        ),
        properties=(
            Property("same time", _("at this size the tree and the ring take the same time"), _same_time),
        ),
        trials=(Trial(_("4, 8 and 64 ranks on three networks"), drive=all_crossovers),),
        wrong_answers=(
            WrongAnswer("latency equals bandwidth", latency_equals_bandwidth, "same time", "in one message"),
            WrongAnswer("natural logarithm", natural_logarithm, "same time", "base 2"),
            WrongAnswer("bits for bytes", counts_bits, "same time", "off by 8"),
            WrongAnswer("the ring sends whole tensors", ring_sends_whole_tensors, "same time", "below zero"),
        ),
    )
)  # fmt: skip
