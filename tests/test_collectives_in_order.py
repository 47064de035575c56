"""A backend that carries out what is between two ranks in the order of the calls, as NCCL does, never deadlocks.

Ranks are threads here, and the backend is a model of NCCL's rules: of two ranks' messages those of one call are matched
in order, the next call's wait until all of this one are through; a group of calls counts as one call.
"""

import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from labkit.collectives.groups import Endpoint
from labkit.collectives.halving_doubling import halving_doubling_all_reduce
from labkit.collectives.naive import naive_all_reduce
from labkit.collectives.pairing import start_together
from labkit.collectives.ring import chunks, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from labkit.collectives.spare_memory import forget_spare
from labkit.collectives.tree import tree_all_reduce

PATIENCE = 5.0  # seconds after which a wait counts as a deadlock


class Message(tuple):  # type: ignore[type-arg]
    """Equal to itself alone: two messages may hold equal tensors."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Call:
    """Messages that a rank started together: (whether it sends, the other rank, the tensor), matched one by one."""

    def __init__(self, fabric: "Fabric") -> None:
        self.fabric = fabric
        self.messages: list[Message] = []
        self.matched: list[Message] = []

    def is_through(self) -> bool:
        return len(self.matched) == len(self.messages)

    def wait(self, timeout: Any = None) -> bool:
        with self.fabric.changed:
            if not self.fabric.changed.wait_for(self.is_through, PATIENCE):
                raise TimeoutError("deadlock")
        return True


class Fabric:
    """What lies between the ranks: for each rank and stream the calls that are not through yet."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.streams: dict[tuple[int, Any], deque[Call]] = defaultdict(deque)

    def start(self, rank: int, stream: Any, call: Call) -> None:
        with self.changed:
            self.streams[rank, stream].append(call)
            while self._match():
                pass
            self.changed.notify_all()

    def _match(self) -> bool:
        """Deliver one message between two calls that are first in their streams; whether there was one."""
        first = {key: calls[0] for key, calls in self.streams.items() if calls}
        for (rank, stream), call in first.items():
            there_of = {other: first.get((other, stream)) for _, other, _ in call.messages}
            for message in call.messages:
                sends, other, tensor = message
                there = there_of[other]
                if not sends or message in call.matched or there is None:
                    continue
                awaited = [one for one in there.messages if not one[0] and one[1] == rank and one not in there.matched]
                if awaited:
                    awaited[0][2].copy_(tensor)
                    there.matched.append(awaited[0])
                    call.matched.append(message)
                    for key, one in (((rank, stream), call), ((other, stream), there)):
                        if one.is_through():
                            self.streams[key].popleft()
                    return True
        return False


class OrderedGroup:
    """The part of a process group that messages call, for one rank."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.rank = fabric, rank
        self.together: Call | None = None

    def _one(self, sends: bool, tensor: torch.Tensor, other: int) -> Call:
        call = self.together or Call(self.fabric)
        call.messages.append(Message((sends, other, tensor)))
        if self.together is None:
            self.fabric.start(self.rank, frozenset((self.rank, other)), call)
        return call

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> Call:
        return self._one(True, tensors[0], other)

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> Call:
        return self._one(False, tensors[0], other)

    def _start_coalescing(self, device: torch.device) -> None:
        self.together = Call(self.fabric)

    def _end_coalescing(self, device: torch.device) -> Call:
        call, self.together = self.together, None
        assert call is not None
        self.fabric.start(self.rank, "group", call)
        return call


def on_ranks(size: int, work: Any) -> list[Any]:
    """`work(endpoint)` on `size` threads."""
    fabric = Fabric()
    ends = [Endpoint(OrderedGroup(fabric, rank), tuple(range(size)), rank, f"{rank}", True) for rank in range(size)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(work, ends))
    forget_spare()
    return results


def mine(end: Endpoint, length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64) * (end.place + 1)


def test_both_receiving_first_is_a_deadlock_unless_started_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the backend refuses what NCCL would hang in, so the tests below can fail."""
    monkeypatch.setitem(globals(), "PATIENCE", 0.2)

    def one_by_one(end: Endpoint) -> None:
        group: Any = end.group
        receiving = group.recv([torch.zeros(1)], 1 - end.place, 0)
        group.send([torch.ones(1)], 1 - end.place, 0)
        receiving.wait()

    with pytest.raises(TimeoutError, match="deadlock"):
        on_ranks(2, one_by_one)

    def together(end: Endpoint) -> float:
        arrived, other = torch.zeros(1), 1 - end.place
        for messages in start_together(end, [(arrived, other)], [(torch.ones(1), other)], 0):
            messages[0].wait()
        return arrived.item()

    assert on_ranks(2, together) == [1.0, 1.0]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", [ring_all_reduce, halving_doubling_all_reduce, tree_all_reduce, naive_all_reduce])
@pytest.mark.parametrize("length", [1, 10, 100])
def test_every_all_reduce_ends(algorithm: Any, size: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.collectives.circulation.PIECE_BYTES", 64)

    def work(end: Endpoint) -> torch.Tensor:
        flat = mine(end, length)
        algorithm(flat, ReduceOp.SUM, end)
        return flat

    wanted = torch.arange(length, dtype=torch.float64) * (size * (size + 1) // 2)
    assert all(torch.equal(one, wanted) for one in on_ranks(size, work))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduce_scatter_and_all_gather_end(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.collectives.circulation.PIECE_BYTES", 64)

    def work(end: Endpoint) -> torch.Tensor:
        output, whole = torch.empty(20, dtype=torch.float64), torch.empty(20 * size, dtype=torch.float64)
        ring_reduce_scatter(output, chunks(mine(end, 20 * size), size), ReduceOp.SUM, end)
        parts = chunks(whole, size)
        parts[end.place].copy_(output)
        ring_all_gather(parts, end)
        return whole

    wanted = torch.arange(20 * size, dtype=torch.float64) * (size * (size + 1) // 2)
    assert all(torch.equal(one, wanted) for one in on_ranks(size, work))
