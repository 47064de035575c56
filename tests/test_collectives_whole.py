"""All collectives at world sizes 1 to 8: equal to a float64 reference, inputs kept, bytes and messages by formula."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from labkit import collectives
from labkit.collectives import Network, ReduceOp, circulation, spare_memory
from labkit.collectives.costs import all_reduce_seconds
from labkit.collectives.fitting import fit_link
from labkit.collectives.formulas import all_reduce_sent
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder

ALGORITHMS = ("naive", "ring", "tree", "halving_doubling")
LENGTHS = (0, 1, 3, 7, 64, 101)
REFERENCES = {"SUM": lambda all_: all_.sum(0), "AVG": lambda all_: all_.mean(0), "MAX": lambda all_: all_.amax(0)}


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 5, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as pool:
        yield pool


def contributions(length: int) -> torch.Tensor:
    """float64 [N, length], the same on every rank; row r is rank r's."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(dist.get_world_size(), length, generator=generator, dtype=torch.float64)


def with_small_pieces(piece_bytes: int) -> None:
    circulation.PIECE_BYTES = piece_bytes


def wrong_reductions(name: str) -> list[str]:
    """What differs from the reference, for all-reduce, reduce and reduce-scatter."""
    rank, size, op = dist.get_rank(), dist.get_world_size(), getattr(ReduceOp, name)
    wrong = []
    for length in LENGTHS[1:]:
        everyone = contributions(length)
        wanted = REFERENCES[name](everyone)
        for algorithm in ALGORITHMS:
            mine = everyone[rank].clone()
            collectives.all_reduce(mine, op, algorithm=algorithm)
            if not torch.allclose(mine, wanted, atol=1e-12):
                wrong.append(f"all_reduce {algorithm} {length}")
        for root in range(size):
            for algorithm in ("naive", "tree"):
                mine = everyone[rank].clone()
                collectives.reduce(mine, root, op, algorithm=algorithm)
                if not torch.allclose(mine, wanted if rank == root else everyone[rank], atol=1e-12):
                    wrong.append(f"reduce {algorithm} {length} to {root}")
        parts = contributions(length * size)
        given, output = parts[rank].clone(), torch.empty(length, dtype=torch.float64)
        collectives.reduce_scatter_tensor(output, given, op)
        if not torch.allclose(output, REFERENCES[name](parts).view(size, length)[rank], atol=1e-12):
            wrong.append(f"reduce_scatter {length}")
        if not torch.equal(given, parts[rank]):
            wrong.append(f"reduce_scatter {length} changed its input")
    return wrong


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("piece_bytes", [circulation.PIECE_BYTES, 24])
def test_reductions_equal_the_reference_and_keep_what_is_no_output(ranks: Ranks, name: str, piece_bytes: int) -> None:
    ranks.run(with_small_pieces, piece_bytes)
    assert ranks.run(wrong_reductions, name) == [[]] * ranks.world_size


def wrong_copies() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for length in LENGTHS:
        everyone = contributions(length)
        gathered = torch.empty(size, length, dtype=torch.float64)
        collectives.all_gather_into_tensor(gathered, everyone[rank].clone())
        if not torch.equal(gathered, everyone):
            wrong.append(f"all_gather {length}")
        for root in range(size):
            for algorithm in ("naive", "tree"):
                mine = everyone[rank].clone()
                collectives.broadcast(mine, root, algorithm=algorithm)
                if not torch.equal(mine, everyone[root]):
                    wrong.append(f"broadcast {algorithm} {length} from {root}")
    given = torch.arange(size * 2).view(size, 2) + 100 * rank
    output = torch.empty_like(given)
    collectives.all_to_all_single(output, given)
    if not torch.equal(
        output, torch.stack([torch.tensor([2 * rank, 2 * rank + 1]) + 100 * one for one in range(size)])
    ):
        wrong.append("all_to_all")
    return wrong


def test_copies_are_exact(ranks: Ranks) -> None:
    assert ranks.run(wrong_copies) == [[]] * ranks.world_size


def uneven_exchange() -> list[int]:
    """Rank r sends s + 1 rows of its number to rank s."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [other + 1 for other in range(size)]
    output = torch.empty(size * (rank + 1), 1, dtype=torch.int64)
    given = torch.full((sum(counts), 1), rank)
    collectives.all_to_all_single(output, given, [rank + 1] * size, counts)
    return output.flatten().tolist()


def test_parts_of_an_all_to_all_may_differ_in_rows(ranks: Ranks) -> None:
    for rank, got in enumerate(ranks.run(uneven_exchange)):
        assert got == [other for other in range(ranks.world_size) for _ in range(rank + 1)]


def several_at_once() -> list[float]:
    """Three in the background, one in the foreground after them: the order of the calls is kept."""
    tensors = [torch.full((5,), float(10**power)) for power in range(4)]
    works = [collectives.all_reduce(one, async_op=True) for one in tensors[:3]]
    collectives.all_reduce(tensors[3])
    for work in works:
        assert work is not None and work.wait() and work.is_completed()
    return [float(one[0]) for one in tensors]


def test_collectives_in_the_background_keep_their_order(ranks: Ranks) -> None:
    size = ranks.world_size
    assert ranks.run(several_at_once) == [[size * 1.0, size * 10.0, size * 100.0, size * 1000.0]] * size


def count(elements: int, algorithm: str) -> None:
    collectives.all_reduce(torch.ones(elements), algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_and_messages_equal_the_formula(ranks: Ranks, algorithm: str) -> None:
    ranks.run(with_small_pieces, circulation.PIECE_BYTES)
    for elements in (0, 1, 5, 64, 1001, 1_300_001):
        with Recorder() as record:
            ranks.run(count, elements, algorithm)
        told = all_reduce_sent(algorithm, elements, 4, ranks.world_size)
        assert (record.bytes_sent, record.messages) == (told.bytes, told.messages), elements


def differing_calls() -> None:
    if dist.get_rank():
        collectives.broadcast(torch.ones(3), 0)
    else:
        collectives.all_reduce(torch.ones(3))


def test_different_collectives_are_named_on_both_sides() -> None:
    with (
        Ranks(2) as two,
        pytest.raises(RankError, match=r"broadcast\(.*\) but rank .*all_reduce\(|all_reduce\(.*but rank"),
    ):
        two.run(differing_calls)


@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    [
        # 4 ranks, 1 ms a message, 1 us a byte, 4,000 bytes: by hand from the definitions
        ("naive", (4e-3 + 1e-3) + (3 * 4e-3 + 1e-3)),
        ("ring", 6 * (1e-3 + 1e-3)),
        ("tree", 2 * (4e-3 + 1e-3) + (4e-3 + 1e-3) + (2 * 4e-3 + 1e-3) - 4e-3),
        ("halving_doubling", 2 * (2e-3 + 1e-3) + 2 * (1e-3 + 1e-3)),
    ],
)
def test_the_model_plays_each_algorithm_as_computed_by_hand(algorithm: str, seconds: float) -> None:
    assert all_reduce_seconds(algorithm, 4000, 4, alpha=1e-3, beta=1e-6) == pytest.approx(seconds)


def test_a_fit_finds_the_line_and_its_errors() -> None:
    sizes = [100, 1000, 10_000, 100_000]
    exact = fit_link(sizes, [5e-4 + 8e-9 * n for n in sizes])
    assert (exact.alpha, exact.beta) == (pytest.approx(5e-4), pytest.approx(8e-9))
    assert exact.alpha_error < 1e-12 and exact.bandwidth_gbit_s == pytest.approx(1)
    noisy = fit_link(sizes, [(5e-4 + 8e-9 * n) * factor for n, factor in zip(sizes, (1.1, 0.9, 1.1, 0.9), strict=True)])
    assert noisy.alpha_error > 1e-5


def test_the_emulated_network_is_named_by_its_numbers() -> None:
    inter = Network(latency_us=500, bandwidth_gbit_s=1)
    network = Network(latency_us=5, bandwidth_gbit_s=100, node_size=2, inter=inter)
    assert str(network) == "5 us, 100 Gbit/s within nodes of 2, 500 us, 1 Gbit/s between them"
    assert network.link(0, 1) is network and network.link(1, 2) is inter


def where_pieces_arrive() -> tuple[bool, int]:
    """Whether all-reduces of several lengths and dtypes take the same memory when they come again; its bytes."""
    lengths = [(length, dtype) for length in (5, 1001, 64) for dtype in (torch.float32, torch.float64, torch.int8)]

    def reduce_all() -> list[torch.Tensor]:
        for length, dtype in lengths:
            collectives.all_reduce(torch.ones(length, dtype=dtype))
        return [one for (end, _, _), one in spare_memory._buffers.items() if end.name == "world"]

    first, second = reduce_all(), reduce_all()
    return [id(one) for one in first] == [id(one) for one in second], sum(one.numel() for one in second)


def test_pieces_arrive_in_the_same_memory_call_after_call(ranks: Ranks) -> None:
    ranks.run(with_small_pieces, circulation.PIECE_BYTES)
    for same, nbytes in ranks.run(where_pieces_arrive):
        assert same and nbytes <= circulation.AHEAD * circulation.PIECE_BYTES
