"""The emulated network delivers exactly when its model says, seen on a clock that stands still but for its delays."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.collectives import Network, all_reduce, barrier, broadcast, irecv, isend, recv, send
from labkit.collectives.emulation import Emulator
from labkit.collectives.settings import settings
from labkit.ranks import Ranks
from labkit.record import Recorder

MS = 1e-3
# 1 ms of latency; a byte leaves in 1 us
NET = Network(latency_us=1000, bandwidth_gbit_s=0.008)
# between nodes of two: 10 ms, 4 us a byte
TWO_LEVELS = Network(
    latency_us=1000, bandwidth_gbit_s=0.008, node_size=2, inter=Network(latency_us=10_000, bandwidth_gbit_s=0.002)
)


class Still:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=20) as ranks:
        yield ranks


# --- the interface by itself ---


def test_a_message_leaves_in_bytes_over_bandwidth_and_arrives_a_latency_later() -> None:
    emulator = Emulator(NET, 0, clock=Still())
    assert emulator.depart(1, 500) == pytest.approx((0.5 * MS, 1.5 * MS))
    assert Emulator(NET, 0, clock=Still()).depart(1, 0) == pytest.approx((0, 1 * MS))


def test_what_a_rank_sends_leaves_one_after_the_other_to_whomever() -> None:
    clock = Still()
    emulator = Emulator(NET, 0, clock=clock)
    arrivals = [emulator.depart(peer, 1000)[1] for peer in (1, 2, 1)]
    assert arrivals == pytest.approx([2 * MS, 3 * MS, 4 * MS])
    clock.now = 10 * MS  # idle since: the queue is empty
    assert emulator.depart(3, 1000) == pytest.approx((11 * MS, 12 * MS))


def test_inside_and_between_nodes_are_two_networks_with_a_queue_each() -> None:
    emulator = Emulator(TWO_LEVELS, 1, clock=Still())
    assert emulator.depart(0, 1000) == pytest.approx((1 * MS, 2 * MS))
    assert emulator.depart(2, 1000) == pytest.approx((4 * MS, 14 * MS))
    assert emulator.depart(3, 1000) == pytest.approx((8 * MS, 18 * MS))
    assert emulator.depart(0, 1000) == pytest.approx((2 * MS, 3 * MS))


def test_nodes_are_ranks_in_order() -> None:
    links = {(a, b): TWO_LEVELS.link(a, b) is TWO_LEVELS for a in range(6) for b in range(6)}
    assert {pair for pair, inside in links.items() if inside} == {
        (a, b) for low in (0, 2, 4) for a in (low, low + 1) for b in (low, low + 1)
    }


def test_waiting_ends_at_the_moment_and_not_before_even_if_sleep_is_short() -> None:
    clock = Still()
    emulator = Emulator(NET, 0, clock=clock, sleep=lambda seconds: clock.sleep(seconds * 0.5 + 1e-6))
    emulator.wait_until(5 * MS)
    assert clock.now >= 5 * MS and len(clock.slept) > 1
    slept = len(clock.slept)
    emulator.wait_until(5 * MS)
    emulator.wait_until(-1)
    assert len(clock.slept) == slept


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"latency_us": -1}, "latency_us is -1; give microseconds, 0 or more"),
        ({"latency_us": math.nan}, "latency_us is nan; give microseconds, 0 or more"),
        ({"latency_us": math.inf}, "latency_us is inf; give microseconds, 0 or more"),
        ({"latency_us": "500"}, "latency_us is '500'; give microseconds, 0 or more"),
        ({"bandwidth_gbit_s": 0}, "bandwidth_gbit_s is 0; give Gbit/s above 0"),
        ({"bandwidth_gbit_s": -3}, "bandwidth_gbit_s is -3; give Gbit/s above 0"),
        ({"bandwidth_gbit_s": math.nan}, "bandwidth_gbit_s is nan; give Gbit/s above 0"),
        ({"bandwidth_gbit_s": None}, "bandwidth_gbit_s is None; give Gbit/s above 0"),
        ({"node_size": 2}, "node_size and inter belong together"),
        ({"inter": NET}, "node_size and inter belong together"),
        ({"node_size": 0, "inter": NET}, "node_size is 0; give the number of ranks in a node, 1 or more"),
        ({"node_size": 1.5, "inter": NET}, "node_size is 1.5; give the number of ranks in a node, 1 or more"),
        ({"node_size": 2, "inter": TWO_LEVELS}, "inter has an inter of its own"),
        ({"node_size": 2, "inter": 5}, "inter is 5; give a Network"),
    ],
)
def test_a_network_that_can_not_be_is_refused_in_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        Network(**{"latency_us": 1, "bandwidth_gbit_s": 1, **arguments})
    assert str(caught.value).startswith("Network: ") and sentence in str(caught.value)


def test_bandwidth_may_be_unlimited_and_latency_nothing() -> None:
    network = Network(latency_us=0, bandwidth_gbit_s=math.inf)
    assert Emulator(network, 0, clock=Still()).depart(1, 10**12) == (0, 0)


def test_a_network_says_what_it_is() -> None:
    assert str(NET) == "1000 us, 0.008 Gbit/s"
    assert str(TWO_LEVELS) == "1000 us, 0.008 Gbit/s within nodes of 2, 10000 us, 0.002 Gbit/s between them"


# --- real messages on a clock that stands still ---


def on_a_still_clock(network: Network, act: Callable[[], Any]) -> Any:
    """`act` on this rank, whose clock moves only by the delays of the network; the seconds that went by, and what
    `act` returned. All ranks start at 0."""
    clock = Still()
    kept, settings.emulator = settings.emulator, Emulator(network, dist.get_rank(), clock=clock, sleep=clock.sleep)
    try:
        result = act()
    finally:
        settings.emulator = kept
    return clock.now, result


def message(sizes: list[int], source: int, destination: int) -> list[bool]:
    tensors = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    if dist.get_rank() == source:
        for work in [isend(tensor, destination) for tensor in tensors]:
            work.wait()
    elif dist.get_rank() == destination:
        for tensor in tensors:
            target = torch.zeros_like(tensor)
            recv(target, source)
            assert target.equal(tensor)
    return []


def seconds(ranks: Ranks, network: Network, act: Callable[..., Any], *args: Any) -> list[float]:
    return [now for now, _ in ranks.run(lambda: on_a_still_clock(network, lambda: act(*args)))]


def test_a_message_takes_alpha_plus_n_beta_and_its_sender_n_beta(four: Ranks) -> None:
    for size in (0, 1, 500, 100_000):
        assert seconds(four, NET, message, [size], 0, 1) == pytest.approx(
            [size * 1e-6, 1 * MS + size * 1e-6, 0, 0], abs=1e-8
        )


def test_messages_of_one_sender_queue(four: Ranks) -> None:
    assert seconds(four, NET, message, [2000, 3000], 2, 0) == pytest.approx([6 * MS, 0, 5 * MS, 0], abs=1e-8)


def test_between_nodes_the_other_network_counts(four: Ranks) -> None:
    assert seconds(four, TWO_LEVELS, message, [1000], 1, 0)[0] == pytest.approx(2 * MS, abs=1e-8)
    assert seconds(four, TWO_LEVELS, message, [1000], 1, 2)[2] == pytest.approx(14 * MS, abs=1e-8)


def exchange(size: int) -> None:
    """Ranks 0 and 1, and 2 and 3, send to each other at once."""
    peer = dist.get_rank() ^ 1
    receiving = irecv(torch.zeros(size, dtype=torch.uint8), peer)
    send(torch.zeros(size, dtype=torch.uint8), peer)
    receiving.wait()


def test_links_carry_both_ways_at_once(four: Ranks) -> None:
    assert seconds(four, NET, exchange, 5000) == pytest.approx([6 * MS] * 4, abs=1e-8)


def gather_at_zero(size: int) -> None:
    if dist.get_rank() == 0:
        for source in (1, 2, 3):
            recv(torch.zeros(size, dtype=torch.uint8), source)
    else:
        send(torch.zeros(size, dtype=torch.uint8), 0)


def test_what_one_rank_receives_does_not_queue(four: Ranks) -> None:
    assert seconds(four, NET, gather_at_zero, 4000) == pytest.approx([5 * MS, 4 * MS, 4 * MS, 4 * MS], abs=1e-8)


def late(seconds_late: float) -> None:
    """The receiver is busy until long after the arrival."""
    if dist.get_rank() == 0:
        send(torch.zeros(1000, dtype=torch.uint8), 1)
    elif dist.get_rank() == 1:
        emulator = settings.emulator
        assert emulator is not None
        emulator.wait_until(seconds_late)
        recv(torch.zeros(1000, dtype=torch.uint8), 0)


def test_a_message_that_is_here_already_is_not_waited_for(four: Ranks) -> None:
    assert seconds(four, NET, late, 1.0)[1] == pytest.approx(1.0, abs=1e-8)


def control_only() -> None:
    for _ in range(5):
        barrier()


def test_control_traffic_is_not_delayed(four: Ranks) -> None:
    assert seconds(four, NET, control_only) == [0, 0, 0, 0]


def reduced(algorithm: str, elements: int) -> float:
    tensor = torch.full((elements,), float(dist.get_rank()))
    all_reduce(tensor, algorithm=algorithm)
    return tensor.sum().item()


@pytest.mark.parametrize("elements", [4, 4000, 100_000])
def test_an_all_reduce_takes_what_the_model_of_its_algorithm_says(four: Ranks, elements: int) -> None:
    """The ring: 2 (N - 1) steps of alpha and a chunk. Naive: one tensor to the first rank, three from it in a row."""
    n, alpha, beta = 4, 1 * MS, 1e-6
    nbytes = 4 * elements
    ring = 2 * (n - 1) * (alpha + nbytes / n * beta)
    assert max(seconds(four, NET, reduced, "ring", elements)) == pytest.approx(ring, rel=1e-6)
    naive = (alpha + nbytes * beta) + ((n - 1) * nbytes * beta + alpha)
    assert max(seconds(four, NET, reduced, "naive", elements)) == pytest.approx(naive, rel=1e-6)


def test_the_results_are_the_same_on_any_network(four: Ranks) -> None:
    answers = four.run(lambda: on_a_still_clock(NET, lambda: reduced("ring", 10)))
    assert [result for _, result in answers] == [60.0] * 4


@pytest.mark.parametrize(("elements", "beside"), [(8, 8), (20_000, 104)])
def test_a_short_payload_carries_its_arrival_and_a_long_one_has_a_header(
    four: Ranks, elements: int, beside: int
) -> None:
    """Control traffic, counted apart: eight bytes in the same message, or a header of thirteen words before it."""

    def control() -> tuple[int, int]:
        with Recorder() as record:
            on_a_still_clock(NET, lambda: all_reduce(torch.ones(elements), algorithm="naive"))
        return record.control_bytes, record.messages

    agreement = 160  # what each rank says to the next one before
    assert four.run(control) == [(agreement + 3 * beside, 3)] + [(agreement + beside, 1)] * 3


def broadcast_once(algorithm: str) -> None:
    broadcast(torch.zeros(1000, dtype=torch.uint8), 0, algorithm=algorithm)


def test_a_broadcast_leaves_the_source_one_copy_after_the_other(four: Ranks) -> None:
    assert sorted(seconds(four, NET, broadcast_once, "naive")) == pytest.approx(
        [2 * MS, 3 * MS, 3 * MS, 4 * MS], abs=1e-8
    )


# --- in real time ---


def stamped(nbytes: int) -> float:
    """When rank 0 began to send, and when rank 1 had the message."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    barrier()
    if dist.get_rank() == 0:
        began = time.perf_counter()
        send(tensor, 1)
        return began
    recv(tensor, 0)
    return time.perf_counter()


def test_in_real_time_nothing_arrives_before_its_modelled_arrival() -> None:
    network = Network(latency_us=20_000, bandwidth_gbit_s=0.1)
    with Ranks(2, timeout=20, network=network) as ranks, Recorder() as record:
        for nbytes in (1, 500_000):
            began, arrived = ranks.run(stamped, nbytes)
            assert arrived - began >= 0.02 + nbytes * 8e-8  # one clock for all processes of a machine
    assert record.network == str(network)
    assert str(network) in repr(ranks)
