"""Records as files: labkit's own JSON, there and back, and the trace format that Perfetto and Chrome open.

Source of the trace format: "Trace Event Format", Chromium project; `ph` "X" is a complete event, "C" a counter, "M"
metadata; times are in microseconds. Open such a file at ui.perfetto.dev.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit.record.entries import MemorySample, Span, Transfer
from labkit.record.record import RankRecord, Record

FORMAT = "labkit-record-1"


def to_json(record: Record) -> str:
    """The whole record as JSON text."""
    ranks = [
        {
            "rank": one.rank,
            "events": [asdict(span) for span in one.events],
            "transfers": [asdict(transfer) for transfer in one.transfers],
            "memory": [asdict(sample) for sample in one.memory],
        }
        for one in record.ranks
    ]
    return json.dumps({"format": FORMAT, "merged": record.merged, "network": record.network, "ranks": ranks})


def from_json(text: str) -> Record:
    """The record that `to_json` wrote. Anything else is refused with a ValueError."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no record: not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"this is no record: its format is not {FORMAT!r}; write it with labkit.record.save")
    try:
        ranks = [
            RankRecord(
                one["rank"],
                [Span(**span) for span in one["events"]],
                [Transfer(**transfer) for transfer in one["transfers"]],
                [MemorySample(**sample) for sample in one["memory"]],
            )
            for one in data["ranks"]
        ]
        return Record(ranks, data["merged"], data["network"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no record: something in it is missing or of another kind ({error})") from None


def save(record: Record, path: str | Path) -> None:
    """Write the record as JSON to `path`."""
    Path(path).write_text(to_json(record))


def load(path: str | Path) -> Record:
    """Read a record that `save` wrote."""
    return from_json(Path(path).read_text())


def chrome_trace(record: Record) -> dict[str, Any]:
    """The record in the trace event format: one process a rank, spans, counters of memory and of bytes sent."""
    zero = record.start
    label = f" (emulated network: {record.network})" if record.network else ""

    def microseconds(seconds: float) -> float:
        return round((seconds - zero) * 1e6, 3)

    events: list[dict[str, Any]] = []
    for one in record.ranks:
        name = {"name": f"rank {one.rank}{label}"}
        events.append({"ph": "M", "name": "process_name", "pid": one.rank, "tid": 0, "args": name})
        for span, line in _lines(one.events):
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.kind,
                    "pid": one.rank,
                    "tid": line,
                    "ts": microseconds(span.start),
                    "dur": round(span.seconds * 1e6, 3),
                    "args": dict(span.details),
                }
            )
        total = 0
        for transfer in one.transfers:
            if transfer.sent and not transfer.control:
                total += transfer.bytes
                events.append(_counter("bytes sent", one.rank, microseconds(transfer.time), {"bytes": total}))
        for sample in one.memory:
            events.append(_counter("memory", one.rank, microseconds(sample.time), {sample.kind: sample.bytes}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lines(spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Each span with its line: on one line the format lets spans lie inside one another, but not overlap in part.

    Compute has the even lines and communication, which may go on meanwhile, the odd ones; nearly always 0 and 1.
    """
    ends: dict[int, list[float]] = {}  # of the spans that are open, by line
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        line = 1 if span.kind in ("communication", "wait") else 0
        while True:
            still_open = [end for end in ends.get(line, ()) if end > span.start]
            if all(span.end <= end for end in still_open):
                break
            line += 2
        ends[line] = [*still_open, span.end]
        yield span, line


def _counter(name: str, rank: int, time: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": rank, "ts": time, "args": values}


def save_chrome_trace(record: Record, path: str | Path) -> None:
    """Write the record to `path` as a trace for ui.perfetto.dev or chrome://tracing."""
    Path(path).write_text(json.dumps(chrome_trace(record)))
