"""A record with spans, memory and a network that nobody measured, for tests of pictures."""

from labkit.record import MemorySample, RankRecord, Record, Span

MIB = 1024**2
NETWORK = "500 µs, 1 Gbit/s"


def step_record(ranks: int = 2, *, network: str | None = NETWORK, layers: int = 2) -> Record:
    """One training step: data, forward, backward with overlapping communication, a wait, a step, a checkpoint, other.

    Rank r computes r milliseconds longer in every layer, so that numbers differ between ranks.
    """
    record = Record(network=network)
    for rank in range(ranks):
        record.merge(rank, _one(rank, layers))
    return record


def _one(rank: int, layers: int) -> RankRecord:
    one, now = RankRecord(rank), 100.0

    def span(name: str, kind: str, ms: float) -> None:
        nonlocal now
        one.events.append(Span(name, kind, rank, now, now + ms / 1e3))
        now += ms / 1e3

    def memory(kind: str, mib: int) -> None:
        one.memory.append(MemorySample(now, rank, kind, mib * MIB))

    memory("parameters", 10)
    span("load", "data", 2)
    for layer in range(layers):
        span(f"layer {layer}", "forward", 5 + rank)
        memory("activations", 8 * (layer + 1))
    for layer in reversed(range(layers)):
        span(f"layer {layer}", "backward", 10 + rank)
        memory("activations", 8 * layer)
        memory("gradients", 5 * (layers - layer))
        one.events.append(Span("all_reduce", "communication", rank, now, now + 0.006))
    span("wait", "wait", 6)
    span("step", "step", 4)
    memory("optimizer_state", 20)
    span("snapshot", "checkpoint", 3)
    memory("gradients", 0)
    span("print", "something else", 1)
    return one
