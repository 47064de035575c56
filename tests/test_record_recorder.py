"""The recorder sees everything while it is open and nothing else; several ranks' records are merged on one clock."""

import importlib
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit import record as room
from labkit.collectives import all_reduce, barrier, recv, send
from labkit.ranks import RankError, Ranks
from labkit.record import (
    RankRecord,
    Record,
    Recorder,
    Span,
    add_memory,
    add_span,
    add_transfer,
    measure_offset,
    recorder,
    recording,
    span,
)


def something_of_each() -> None:
    with span("a step", "step", number=3):
        add_transfer(1, 40, operation="send", group="world", sent=True)
        add_transfer(1, 104, operation="send", group="world", sent=True, control=True)
        add_transfer(2, 60, operation="recv", group="tp", sent=False)
        add_memory("gradients", 1000)
    add_span("known", "forward", 1.0, 3.5)


def test_with_no_recorder_open_nothing_is_built_and_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            calls.append("clock")
            return 0.0

    monkeypatch.setattr(recorder, "time", Clock)
    for name in ("Span", "Transfer", "MemorySample"):
        monkeypatch.setattr(recorder, name, lambda *_, name=name: calls.append(name))
    something_of_each()
    assert calls == [] and not recording()
    with Recorder():
        assert recording()
        something_of_each()
    assert sorted(set(calls)) == ["MemorySample", "Span", "Transfer", "clock"]


def count_calls(turns: int) -> tuple[int, int]:
    """Calls to the recorder from a collective, without and with a recorder."""
    calls: Any = importlib.import_module("labkit.collectives.calls")
    messages: Any = importlib.import_module("labkit.collectives.messages")

    seen: list[Any] = []
    kept = messages.add_transfer, calls.add_span
    messages.add_transfer = lambda *args, **kwargs: seen.append(args)
    calls.add_span = lambda *args, **kwargs: seen.append(args)
    try:
        counts = []
        for _ in range(2):
            for _ in range(turns):
                all_reduce(torch.ones(10))
            counts.append(len(seen))
            seen.clear()
            opened = Recorder()
            opened.__enter__()
        opened.__exit__()
    finally:
        messages.add_transfer, calls.add_span = kept
        recorder._open.clear()
    return counts[0], counts[1]


def test_collectives_tell_the_recorder_nothing_while_it_is_off(two: Ranks) -> None:
    for off, on in two.run(count_calls, 5):
        assert off == 0 and on > 0


def test_what_is_recorded_is_counted_by_direction_and_control_traffic_apart() -> None:
    with Recorder() as record:
        something_of_each()
        something_of_each()
    assert (record.bytes_sent, record.bytes_received, record.messages) == (80, 120, 2)
    assert (record.control_bytes, record.control_messages) == (208, 2)
    assert [sample.bytes for sample in record.memory] == [1000, 1000]
    first, *_ = (one for one in record.events if one.name == "a step")
    assert first.kind == "step" and first.details == {"number": 3} and first.end >= first.start
    assert [one.seconds for one in record.events if one.name == "known"] == [2.5, 2.5]


def test_counts_by_operation_group_and_peer_leave_out_control_and_received() -> None:
    with Recorder() as record:
        for peer, operation, group in (
            (1, "send", "dp"),
            (2, "send", "tp"),
            (2, "all_reduce", "tp"),
            (2, "send", "tp"),
        ):
            add_transfer(peer, 10, operation=operation, group=group, sent=True)
        add_transfer(1, 7, operation="send", group="dp", sent=True, control=True)
        add_transfer(1, 9, operation="recv", group="dp", sent=False)
    assert record.bytes_by("operation") == {"send": 30, "all_reduce": 10}
    assert record.bytes_by("group") == {"dp": 10, "tp": 30}
    assert record.messages_by("peer") == {1: 1, 2: 3}
    assert record.messages_by("operation", "group") == {("send", "dp"): 1, ("send", "tp"): 2, ("all_reduce", "tp"): 1}
    with pytest.raises(ValueError, match="counted by operation, group, peer, not by 'rank'"):
        record.bytes_by("rank")
    with pytest.raises(ValueError, match="say by what to count"):
        record.bytes_by()


def test_recorders_may_be_nested_and_each_sees_what_happens_while_it_is_open() -> None:
    with Recorder() as outer:
        add_memory("parameters", 1)
        with Recorder() as inner:
            add_memory("parameters", 2)
        add_memory("parameters", 3)
    add_memory("parameters", 4)
    assert [one.bytes for one in outer.memory] == [1, 2, 3]
    assert [one.bytes for one in inner.memory] == [2]


def test_a_recorder_closes_when_its_block_fails_and_a_span_keeps_its_end() -> None:
    with pytest.raises(KeyError), Recorder() as record, span("fails", "forward"):
        raise KeyError
    assert not recording() and [one.name for one in record.events] == ["fails"]


def add_often(times: int) -> None:
    for _ in range(times):
        add_memory("x", 1)


def test_threads_record_side_by_side() -> None:
    with Recorder() as record:
        threads = [threading.Thread(target=add_often, args=(500,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(record.memory) == 2000


def work_on_a_rank(turns: int) -> int:
    for _ in range(turns):
        all_reduce(torch.ones(6, dtype=torch.float64))
    barrier()
    with span("mine", "forward"):
        add_memory("parameters", 100 + dist.get_rank())
    with Recorder() as own:
        all_reduce(torch.ones(6, dtype=torch.float64))
    assert not isinstance(own.bytes_sent, list)
    return int(own.bytes_sent)


def test_the_records_of_all_ranks_come_back_merged_in_rank_order(two: Ranks) -> None:
    with Recorder() as record:
        own = two.run(work_on_a_rank, 2)
        two.run(work_on_a_rank, 1)
    assert own == [48, 48]  # in a rank an int; two ranks send each other all of it
    assert record.bytes_sent == [5 * 48, 5 * 48] and record.messages == [5, 5]
    assert [one.rank for one in record.ranks] == [0, 1] and record.ranks[1].bytes_sent == 240
    assert record.bytes_by("operation") == [{"all_reduce": 240}] * 2
    assert all(count > 0 for count in record.control_bytes)
    assert [sample.bytes for sample in record.ranks[1].memory] == [101, 101]
    assert {one.rank for one in record.ranks[1].events} == {1}
    assert {one.group for one in record.transfers} == {"world"} and record.network is None


def test_merged_records_are_on_the_clock_of_the_process_that_collects_them(two: Ranks) -> None:
    with Recorder() as record:
        two.run(work_on_a_rank, 0)
        begin = time.perf_counter()
        two.run(work_on_a_rank, 3)
        end = time.perf_counter()
    before = [one for one in record.events if one.end <= begin]
    later = record.events[len(before) :]
    assert before and later and all(begin <= one.start <= one.end <= end for one in later)
    assert record.events == sorted(record.events, key=lambda one: (one.start, one.rank))


def test_a_failing_call_leaves_what_was_recorded_before(two: Ranks) -> None:
    def fail() -> None:
        all_reduce(torch.ones(2))
        raise ValueError("on purpose")

    with Recorder() as record, pytest.raises(RankError):
        two.run(fail)
    assert record.messages == [1, 1]


@pytest.mark.parametrize("skew", [-3600.0, 0.0, 12.5])
def test_the_offset_between_two_clocks_is_found_within_its_bound(monkeypatch: pytest.MonkeyPatch, skew: float) -> None:
    now, waits = [100.0], iter([0.5, 0.1, 0.004, 0.3, 0.02, 0.2, 0.001, 0.003, 0.4, 0.0])

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

    def read_remote() -> float:
        now[0] += next(waits)  # the way there
        remote = now[0] - skew
        now[0] += next(waits)  # the way back
        return remote

    monkeypatch.setattr(room.clock, "time", Clock)
    offset, error = measure_offset(read_remote)
    # the fastest of the five trips took 0.001 and 0.003 s
    assert error == pytest.approx(0.002) and abs(offset - skew) <= error + 1e-9


def test_merging_moves_times_onto_one_clock() -> None:
    one = RankRecord(0)
    one.events.append(Span("a", "forward", 0, 1.0, 2.0))
    record = Record()
    record.merge(2, one, offset=10.0)
    record.merge(2, one, offset=20.0)
    assert [rank.rank for rank in record.ranks] == [0, 1, 2]
    assert [(span.rank, span.start, span.end) for span in record.events] == [(2, 11.0, 12.0), (2, 21.0, 22.0)]
    assert record.start == 11.0 and record.bytes_sent == [0, 0, 0]
    assert one.events[0].start == 1.0  # what was merged is left alone


def talk() -> None:
    rank = dist.get_rank()
    tensor = torch.zeros(10)
    if rank == 0:
        send(tensor, 1)
    else:
        recv(tensor, 0)


def test_both_ends_of_a_message_are_recorded(two: Ranks) -> None:
    with Recorder() as record:
        two.run(talk)
    payload = [one for one in record.transfers if not one.control]
    assert {(one.rank, one.peer, one.sent, one.operation, one.bytes) for one in payload} == {
        (0, 1, True, "send", 40),
        (1, 0, False, "recv", 40),
    }
    assert record.bytes_sent == [40, 0] and record.bytes_received == [0, 40]
