"""Records: what was seen on one rank, and on all of them."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.record.entries import MemorySample, Span, Transfer


@dataclass
class RankRecord:
    """What one rank did. Counts are read from the list of transfers; control traffic is left out unless asked for."""

    rank: int = 0
    events: list[Span] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)

    def _chosen(self, sent: bool, control: bool) -> Iterable[Transfer]:
        return (t for t in self.transfers if t.sent is sent and t.control is control)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank sent."""
        return sum(t.bytes for t in self._chosen(sent=True, control=False))

    @property
    def bytes_received(self) -> int:
        """Payload bytes that this rank received."""
        return sum(t.bytes for t in self._chosen(sent=False, control=False))

    @property
    def messages(self) -> int:
        """Payload messages that this rank sent."""
        return sum(1 for _ in self._chosen(sent=True, control=False))

    @property
    def control_bytes(self) -> int:
        """Bytes of headers and barriers that this rank sent."""
        return sum(t.bytes for t in self._chosen(sent=True, control=True))

    @property
    def control_messages(self) -> int:
        """Headers and barrier messages that this rank sent."""
        return sum(1 for _ in self._chosen(sent=True, control=True))

    def bytes_by(self, *keys: str) -> dict[Any, int]:
        """Payload bytes sent, by `"operation"`, `"group"` or `"peer"`; several keys give tuples."""
        return self._by(keys, lambda transfer: transfer.bytes)

    def messages_by(self, *keys: str) -> dict[Any, int]:
        """Payload messages sent, by the same keys as `bytes_by`."""
        return self._by(keys, lambda transfer: 1)

    def _by(self, keys: tuple[str, ...], amount: Any) -> dict[Any, int]:
        known = ("operation", "group", "peer")
        for key in keys:
            if key not in known:
                raise ValueError(f"a record is counted by {', '.join(known)}, not by {key!r}")
        if not keys:
            raise ValueError(f"say by what to count: {', '.join(known)}")
        totals: dict[Any, int] = defaultdict(int)
        for transfer in self._chosen(sent=True, control=False):
            values = tuple(getattr(transfer, key) for key in keys)
            totals[values[0] if len(values) == 1 else values] += amount(transfer)
        return dict(totals)

    def add(self, other: "RankRecord", *, offset: float = 0.0, rank: int | None = None) -> None:
        """Append what `other` saw, its times moved by `offset` seconds and its rank set to `rank`."""
        number = self.rank if rank is None else rank
        for span in other.events:
            self.events.append(replace(span, rank=number, start=span.start + offset, end=span.end + offset))
        for transfer in other.transfers:
            self.transfers.append(replace(transfer, rank=number, time=transfer.time + offset))
        for sample in other.memory:
            self.memory.append(replace(sample, rank=number, time=sample.time + offset))


@dataclass
class Record:
    """The records of all ranks on one clock.

    Read in a rank, where there is one record, `bytes_sent` and the like are ints. Read where the ranks were
    started, they are lists in rank order, and `ranks[i]` is one rank's.
    """

    ranks: list[RankRecord] = field(default_factory=lambda: [RankRecord()])
    merged: bool = False
    network: str | None = None  # the emulated network in words, None where transfers took their real time
    _start: tuple[int, float] | None = field(default=None, init=False, repr=False, compare=False)

    def _each(self, name: str) -> Any:
        values = [getattr(one, name) for one in self.ranks]
        return values if self.merged else values[0]

    @property
    def bytes_sent(self) -> Any:
        """Payload bytes sent: an int in a rank, a list in rank order for several."""
        return self._each("bytes_sent")

    @property
    def bytes_received(self) -> Any:
        """Payload bytes received: an int in a rank, a list in rank order for several."""
        return self._each("bytes_received")

    @property
    def messages(self) -> Any:
        """Payload messages sent: an int in a rank, a list in rank order for several."""
        return self._each("messages")

    @property
    def control_bytes(self) -> Any:
        """Bytes of headers and barriers sent: an int in a rank, a list in rank order for several."""
        return self._each("control_bytes")

    @property
    def control_messages(self) -> Any:
        """Headers and barrier messages sent: an int in a rank, a list in rank order for several."""
        return self._each("control_messages")

    def bytes_by(self, *keys: str) -> Any:
        """Payload bytes sent by `"operation"`, `"group"` or `"peer"`: a dict, or a list of them in rank order."""
        values = [one.bytes_by(*keys) for one in self.ranks]
        return values if self.merged else values[0]

    def messages_by(self, *keys: str) -> Any:
        """Payload messages sent by the same keys: a dict, or a list of them in rank order."""
        values = [one.messages_by(*keys) for one in self.ranks]
        return values if self.merged else values[0]

    @property
    def events(self) -> list[Span]:
        """The spans of all ranks in order of their start."""
        return sorted((span for one in self.ranks for span in one.events), key=lambda span: (span.start, span.rank))

    @property
    def transfers(self) -> list[Transfer]:
        """The transfers of all ranks, control traffic included, in order of time."""
        return sorted((t for one in self.ranks for t in one.transfers), key=lambda t: (t.time, t.rank))

    @property
    def memory(self) -> list[MemorySample]:
        """The memory samples of all ranks in order of time."""
        return sorted((s for one in self.ranks for s in one.memory), key=lambda s: (s.time, s.rank))

    @property
    def start(self) -> float:
        """The earliest time in the record, in seconds; pictures count from here."""
        # asked for once a span by whoever draws them: looked for again only when something has come
        entries = sum(len(one.events) + len(one.transfers) + len(one.memory) for one in self.ranks)
        if self._start is None or self._start[0] != entries:
            times = [span.start for one in self.ranks for span in one.events]
            times += [t.time for one in self.ranks for t in one.transfers]
            times += [s.time for one in self.ranks for s in one.memory]
            self._start = entries, min(times, default=0.0)
        return self._start[1]

    def merge(self, rank: int, other: RankRecord, *, offset: float = 0.0) -> None:
        """Add one rank's record, its clock moved by `offset` seconds onto ours."""
        if not self.merged:
            self.ranks, self.merged = [], True
        while len(self.ranks) <= rank:
            self.ranks.append(RankRecord(len(self.ranks)))
        self.ranks[rank].add(other, offset=offset)
