"""Lesson 03: the ring all-reduce."""

from collections.abc import Callable
from typing import Any

from labkit.learn.catalog_values import drawn, rank_and_size
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property, equality, messages
from labkit.words import _

ITEMSIZE = 4  # float32


def twelve(rank: int, world_size: int) -> tuple[Any, ...]:
    return (drawn(100 + rank, 12),)


def seven(rank: int, world_size: int) -> tuple[Any, ...]:
    return (drawn(100 + rank, 7),)


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


def contributions(outcome: Outcome) -> list[Any]:
    """Each rank's tensor, in rank order."""
    return [outcome.inputs(rank)[0] for rank in range(outcome.world_size)]


def _sums(outcome: Outcome) -> list[Any]:
    total = sum(contributions(outcome))
    return [total] * outcome.world_size


def length_of(outcome: Outcome) -> int:
    """Elements that one rank contributes."""
    return len(outcome.inputs(0)[0])


def _ring_bytes(outcome: Outcome) -> Finding:
    """Per rank where N divides the length; elsewhere in sum, since which chunks are longer is the learner's choice."""
    size, length = outcome.world_size, length_of(outcome)
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


def flow(values: Any) -> tuple[int, int, list[Any]]:
    """Ranks, this rank, and the values in as many chunks, which are views."""
    me, size = rank_and_size()
    return size, me, list(values.tensor_split(size))


def swap(outgoing: Any, incoming: Any) -> None:
    """Send to the next rank while receiving from the one before; nothing on one rank."""
    from labkit import collectives

    me, size = rank_and_size()
    if size == 1:
        return
    receiving = collectives.irecv(incoming, (me - 1) % size)
    collectives.isend(outgoing, (me + 1) % size).wait()
    receiving.wait()


def passes_whole_tensors(tensor: Any) -> None:
    """Three times the tensor at N = 4."""
    size, _me, _chunks = flow(tensor)
    passing = tensor.clone()
    for _step in range(size - 1):
        arrived = passing.clone()
        swap(passing, arrived)
        tensor += arrived
        passing = arrived


def passes_whole_tensors_in_both_phases(tensor: Any) -> None:
    """Six times the tensor at N = 4."""
    passes_whole_tensors(tensor)
    size, _me, _chunks = flow(tensor)
    for _step in range(size - 1):
        swap(tensor.clone(), tensor)


def gathers_at_rank_zero(tensor: Any) -> None:
    from labkit import collectives

    me, size = rank_and_size()
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
    size, me, chunks = flow(tensor)
    for step in range(size - 1 + first_phase):
        incoming = chunks[(me - step - 1) % size]
        arrived = incoming.clone()
        swap(chunks[(me - step) % size], arrived)
        incoming += arrived
    tensor *= scale
    for step in range(size - 1):
        swap(chunks[(me + gather_from - step) % size], chunks[(me + gather_from - step - 1) % size])


def stops_a_step_early(tensor: Any) -> None:
    _ring(tensor, first_phase=-1)


def gathers_the_wrong_chunk(tensor: Any) -> None:
    _ring(tensor, gather_from=0)


def averages(tensor: Any) -> None:
    _ring(tensor, scale=1 / flow(tensor)[0])


def drops_the_remainder(tensor: Any) -> None:
    size = flow(tensor)[0]
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
