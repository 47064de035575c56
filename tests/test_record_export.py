"""Records go to JSON and back unchanged, and to the trace event format by its rules."""

import json
from pathlib import Path
from typing import Any

import pytest
from invented_records import step_record

from labkit.record import (
    MemorySample,
    RankRecord,
    Record,
    Recorder,
    Span,
    Transfer,
    add_memory,
    chrome_trace,
    from_json,
    load,
    save,
    save_chrome_trace,
    to_json,
)


def full_record() -> Record:
    """Two ranks with spans, transfers of every sort and memory, on an emulated network."""
    record = step_record(2)
    for one in record.ranks:
        for number in range(3):
            time = 100.0 + number / 7
            one.transfers.append(Transfer(time, one.rank, 1 - one.rank, 1000 + number, "all_reduce", "dp", True))
            one.transfers.append(Transfer(time, one.rank, 1 - one.rank, 104, "all_reduce", "dp", True, True))
            one.transfers.append(Transfer(time, one.rank, 1 - one.rank, 500, "all_reduce", "dp", False))
    record.ranks[0].events.append(Span("né", "other", 0, 0.1 + 0.2, 1e9 / 3, {"n": 1, "x": 0.1, "ok": True, "s": "a"}))
    return record


def test_a_record_comes_back_from_json_unchanged(tmp_path: Path) -> None:
    record = full_record()
    again = from_json(to_json(record))
    assert again == record and again.bytes_sent == record.bytes_sent == [3003, 3003]
    save(record, tmp_path / "record.json")
    assert load(tmp_path / "record.json") == record
    with Recorder() as own:
        add_memory("parameters", 5)
    assert from_json(to_json(own)).memory == own.memory and not from_json(to_json(own)).merged
    assert from_json(to_json(Record())) == Record()


def change(**fields: Any) -> str:
    data = json.loads(to_json(full_record()))
    data.update(fields)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "[]",
        "null",
        '{"format": "something-else"}',
        '{"format": "labkit-record-1"}',
        change(format="labkit-record-99"),
        change(ranks=5),
        change(ranks=[{"rank": 0}]),
        change(ranks=[{"rank": 0, "events": [{"name": "a"}], "transfers": [], "memory": []}]),
        change(ranks=[{"rank": 0, "events": [], "transfers": [{"surprise": 1}], "memory": []}]),
        to_json(full_record())[:-40],
    ],
)
def test_anything_else_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^this is no record: ") as caught:
        from_json(text)
    assert "\n" not in str(caught.value)


def test_the_trace_obeys_the_trace_event_format(tmp_path: Path) -> None:
    record = full_record()
    save_chrome_trace(record, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["pid"] in (0, 1)
        if event["ph"] == "X":
            assert isinstance(event["cat"], str) and isinstance(event["tid"], int)
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["args"], dict)
        elif event["ph"] == "C":
            assert event["ts"] >= 0 and event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        else:
            assert event["ph"] == "M" and event["name"] == "process_name"
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(record.events)


def test_times_are_microseconds_from_the_first_event_and_processes_are_ranks() -> None:
    record = Record()
    one = RankRecord(1)
    one.events.append(Span("forward", "forward", 1, 5.0, 5.25))
    one.memory.append(MemorySample(4.5, 1, "gradients", 12))
    record.merge(1, one)
    events = chrome_trace(record)["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named == {0: "rank 0", 1: "rank 1"}
    (span,) = (event for event in events if event["ph"] == "X")
    assert (span["ts"], span["dur"], span["pid"], span["cat"]) == (500_000, 250_000, 1, "forward")
    (counter,) = (event for event in events if event["ph"] == "C")
    assert (counter["ts"], counter["args"]) == (0, {"gradients": 12})


def test_an_emulated_network_is_named_in_the_trace() -> None:
    events = chrome_trace(full_record())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == [f"rank {rank} (emulated network: {full_record().network})" for rank in (0, 1)]


def test_the_counter_of_bytes_adds_up_to_what_the_record_counts_and_leaves_control_out() -> None:
    record = full_record()
    events = chrome_trace(record)["traceEvents"]
    sent = [event["args"]["bytes"] for event in events if event["name"] == "bytes sent" and event["pid"] == 0]
    assert sent == [1000, 2001, 3003] and sent[-1] == record.ranks[0].bytes_sent


def test_spans_on_one_line_of_the_trace_never_overlap_in_part() -> None:
    record = Record()
    one = RankRecord(0)
    times = [
        ("communication", 0, 10), ("communication", 2, 5), ("communication", 8, 12), ("communication", 9, 11),
        ("wait", 12, 13), ("forward", 1, 9), ("forward", 3, 4), ("backward", 9, 20),
    ]  # fmt: skip
    for kind, start, end in times:
        one.events.append(Span(f"{start}-{end}", kind, 0, float(start), float(end)))
    record.merge(0, one)
    spans = [event for event in chrome_trace(record)["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(times)
    for a in spans:
        for b in spans:
            if a is not b and a["tid"] == b["tid"] and a["ts"] <= b["ts"]:
                ends = a["ts"] + a["dur"], b["ts"] + b["dur"]
                assert ends[0] <= b["ts"] or ends[1] <= ends[0], (a["name"], b["name"])
    lines = {span["name"]: span["tid"] for span in spans}
    assert lines["1-9"] == lines["3-4"] == lines["9-20"] == 0  # compute has a line of its own
    assert lines["0-10"] == lines["2-5"] == lines["12-13"] == 1 and lines["8-12"] == lines["9-11"] == 3
