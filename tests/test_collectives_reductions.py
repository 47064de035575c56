"""`all_reduce` and `broadcast`: the right values, the same bits on every rank, and bytes exactly by formula."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_groups import new_group
from torch.distributed import ReduceOp

from labkit.collectives import all_reduce, barrier, broadcast, reduce_scatter_tensor
from labkit.collectives.all_reduction import ALGORITHMS
from labkit.collectives.circulation import PIECE_BYTES
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder

View = Callable[[torch.Tensor], torch.Tensor]
SIZES = (1, 2, 3, 4)
Case = tuple[int, str, str, tuple[int, ...], torch.dtype]  # ranks, algorithm, operation, shape, dtype
LENGTHS = (0, 1, 2, 3, 5, 8, 1000, 4099)
LONG = 2 * PIECE_BYTES // 4 + 12_345  # float32 elements of which half takes more than one piece


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=20) as ranks:
        yield ranks


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank puts in: values that show when one is missing, doubled or swapped, and sums that round."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def reference(op: str, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """In float64 (complex128, int64), in one process."""
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    parts = torch.stack([contribution(rank, shape, dtype).to(wide) for rank in range(ranks)])
    if op in ("MAX", "MIN"):
        return parts.amax(0) if op == "MAX" else parts.amin(0)
    if op == "PRODUCT":
        return parts.prod(0)
    return parts.sum(0) / (ranks if op == "AVG" else 1)


def reduce_cases(cases: list[Case]) -> list[torch.Tensor | None]:
    """Each case on the first so many ranks; None where this rank takes no part."""
    groups = {size: new_group(range(size)) for size in SIZES}
    found: list[torch.Tensor | None] = []
    for size, algorithm, op, shape, dtype in cases:
        if (rank := dist.get_rank()) >= size:
            found.append(None)
            continue
        tensor = contribution(rank, shape, dtype)
        assert all_reduce(tensor, getattr(ReduceOp, op), groups[size], algorithm=algorithm) is None
        found.append(tensor)
    return found


def check(ranks: Ranks, cases: list[Case]) -> None:
    answers = ranks.run(reduce_cases, cases)
    for number, (size, algorithm, op, shape, dtype) in enumerate(cases):
        results = [answer[number] for answer in answers[:size]]
        told = f"{algorithm} {op} {dtype} {list(shape)} over {size}"
        for result in results:
            bits = result.flatten().view(torch.uint8) if result.numel() else result
            first = results[0].flatten().view(torch.uint8) if result.numel() else results[0]
            assert torch.equal(bits, first), f"{told}: the ranks' bits differ"
        truth = reference(op, shape, dtype, size)
        exact = not (dtype.is_floating_point or dtype.is_complex)
        # rounding of one sum, at most size - 1 times
        tolerance = 0.0 if exact else size * torch.finfo(dtype).eps
        scale = 1 if op == "PRODUCT" or exact else truth.abs().max().item() if truth.numel() else 1
        torch.testing.assert_close(results[0].to(truth.dtype), truth, rtol=tolerance, atol=tolerance * scale, msg=told)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_sums_of_every_length_equal_one_process(four: Ranks, size: int, algorithm: str) -> None:
    check(four, [(size, algorithm, "SUM", (length,), torch.float32) for length in (*LENGTHS, LONG)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_dtype_and_operation_equals_one_process(four: Ranks, algorithm: str) -> None:
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    integers = (torch.int64, torch.int32, torch.uint8)
    common = ("SUM", "MAX", "MIN", "PRODUCT")
    cases: list[Case] = [(3, algorithm, op, (7, 5), dtype) for op in (*common, "AVG") for dtype in floats]
    cases += [(3, algorithm, op, (7, 5), dtype) for op in common for dtype in integers]
    cases += [(3, algorithm, op, (7,), torch.complex64) for op in ("SUM", "AVG", "PRODUCT")]
    check(four, cases)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_shape_may_be_reduced_a_single_number_and_nothing_too(four: Ranks, algorithm: str) -> None:
    shapes = [(), (1,), (0, 3), (2, 3, 4, 5), (1,) * 9]
    check(four, [(size, algorithm, "AVG", shape, torch.float64) for shape in shapes for size in (2, 4)])


def reduce_strided(algorithm: str) -> list[bool]:
    good = []
    views: list[View] = [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3, 2:5], lambda t: t[2]]
    for view in views:
        whole = contribution(dist.get_rank(), (6, 8), torch.float64)
        kept, expected = whole.clone(), whole.clone()
        all_reduce(view(whole), algorithm=algorithm)
        view(expected).copy_(view(reference("SUM", (6, 8), torch.float64, 4)))
        good.append(torch.allclose(whole, expected, rtol=1e-14) and not torch.equal(whole, kept))
    return good


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_view_is_reduced_in_place_and_what_it_does_not_show_is_untouched(four: Ranks, algorithm: str) -> None:
    assert four.run(reduce_strided, algorithm) == [[True] * 4] * 4


def orders() -> tuple[bool, bool]:
    """The order of the sum, which float32 shows in its last bits: naive by rank, the ring from the next rank on."""
    parts = [contribution(rank, (403,), torch.float32) for rank in range(4)]
    naive, ring = parts[dist.get_rank()].clone(), parts[dist.get_rank()].clone()
    all_reduce(naive, algorithm="naive")
    all_reduce(ring, algorithm="ring")
    by_rank = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    turned = []
    for chunk, pieces in enumerate(zip(*(part.tensor_split(4) for part in parts), strict=True)):
        first, *others = [pieces[(chunk + 1 + step) % 4] for step in range(4)]
        for other in others:
            first = first + other
        turned.append(first)
    return torch.equal(naive, by_rank), torch.equal(ring, torch.cat(turned))


def test_sums_are_made_in_the_order_that_the_algorithm_states(four: Ranks) -> None:
    assert four.run(orders) == [(True, True)] * 4


def in_two_groups(turns: int) -> tuple[list[float], dict[str, int]]:
    """Ranks 0 and 2, and ranks 1 and 3, reduce at the same time."""
    groups = [new_group([0, 2]), new_group([1, 3])]
    rank, found = dist.get_rank(), []
    with Recorder() as record:
        for turn in range(turns):
            tensor = torch.full((5,), float(10**rank * (turn + 1)))
            all_reduce(tensor, group=groups[rank % 2])
            found.append(tensor[4].item())
    return found, record.ranks[0].bytes_by("group")


def test_two_groups_may_reduce_at_once_and_are_counted_by_name(four: Ranks) -> None:
    answers = four.run(in_two_groups, 5)
    for rank, (found, groups) in enumerate(answers):
        assert found == [(101 if rank % 2 == 0 else 1010) * (turn + 1) for turn in range(5)]
        # two chunks of 3 and 2 elements, each once round: 3 + 2 elements a call
        assert groups == {f"ranks {rank % 2},{rank % 2 + 2}": 5 * 5 * 4}


def chunk_sizes(elements: int, count: int) -> list[int]:
    return [len(chunk) for chunk in torch.arange(elements).tensor_split(count)]


def pieces_of(elements: int, itemsize: int) -> int:
    return max(1, -(-elements // (PIECE_BYTES // itemsize)))


def count_all_reduce(size: int, algorithm: str, elements: int, dtype: torch.dtype) -> None:
    group = new_group(range(size))
    if dist.get_rank() < size:
        all_reduce(torch.zeros(elements, dtype=dtype), group=group, algorithm=algorithm)


@pytest.mark.parametrize("size", SIZES)
def test_naive_sends_by_its_formula(four: Ranks, size: int) -> None:
    """The first rank gets every tensor and sends the result to every other: (N - 1) K bytes each way."""
    for elements, dtype in ((0, torch.float32), (3, torch.float64), (LONG, torch.float32)):
        with Recorder() as record:
            four.run(count_all_reduce, size, "naive", elements, dtype)
        nbytes = elements * dtype.itemsize
        first, others = (size - 1) * nbytes, [nbytes] * (size - 1)
        assert record.bytes_sent[:size] == [first, *others] == record.bytes_received[:size]
        assert record.messages[:size] == [size - 1, *[1] * (size - 1)]
        assert max(record.bytes_sent) == (size - 1) * nbytes and sum(record.bytes_sent) == 2 * (size - 1) * nbytes


@pytest.mark.parametrize("size", SIZES)
def test_the_ring_sends_by_its_formula(four: Ranks, size: int) -> None:
    """A rank passes on every chunk but its own, then every chunk but the next rank's. Two ranks whose
    chunks are one piece each send each other all."""
    cases = [(length, torch.float32) for length in LENGTHS] + [(LONG, torch.float32), (17, torch.float64)]
    for elements, dtype in [*cases, (12, torch.int8)]:
        with Recorder() as record:
            four.run(count_all_reduce, size, "ring", elements, dtype)
        lengths = chunk_sizes(elements, size)
        pieces = [pieces_of(length, dtype.itemsize) for length in lengths]
        for rank in range(size):
            passed = [c for c in range(size) if c != rank] + [c for c in range(size) if c != (rank + 1) % size]
            assert record.bytes_sent[rank] == dtype.itemsize * sum(lengths[chunk] for chunk in passed)
            swapped = size == 2 and pieces[0] == 1
            messages = pieces_of(elements, dtype.itemsize) if swapped else sum(pieces[chunk] for chunk in passed)
            assert record.messages[rank] == messages
            if elements % size == 0:
                assert record.bytes_sent[rank] == 2 * elements * dtype.itemsize * (size - 1) // size
        assert sum(record.bytes_sent) == sum(record.bytes_received) == 2 * (size - 1) * elements * dtype.itemsize
        assert record.bytes_by("operation")[0] in ({"all_reduce": record.bytes_sent[0]}, {})


def test_a_long_chunk_travels_in_pieces_and_its_messages_say_so(four: Ranks) -> None:
    with Recorder() as record:
        four.run(count_all_reduce, 2, "ring", 2 * PIECE_BYTES, torch.uint8)
    assert record.messages[:2] == [2, 2]  # each sends all it has, in two pieces
    with Recorder() as record:
        four.run(count_all_reduce, 2, "ring", 5 * PIECE_BYTES, torch.uint8)
    assert record.messages[:2] == [6, 6]  # two chunks of 2.5 pieces
    with Recorder() as record:
        four.run(count_all_reduce, 4, "ring", 10 * PIECE_BYTES, torch.uint8)
    assert record.messages == [18] * 4  # six chunks of 2.5 pieces, three messages each
    with Recorder() as record:
        four.run(count_all_reduce, 4, "ring", 4 * PIECE_BYTES, torch.uint8)
    assert record.messages == [6] * 4


def test_one_rank_alone_sends_nothing(four: Ranks) -> None:
    with Recorder() as record:
        for algorithm in ALGORITHMS:
            four.run(count_all_reduce, 1, algorithm, 100, torch.float32)
    assert record.bytes_sent == [0] * 4 and record.control_bytes == [0] * 4


def broadcast_from(source: int, algorithm: str) -> tuple[bool, bool]:
    group = new_group([0, 2, 3])
    if dist.get_rank() == 1:
        return True, True
    base = contribution(dist.get_rank(), (5, 4), torch.float64)
    broadcast(base.t(), source, group, algorithm=algorithm)
    other = torch.full((2,), dist.get_rank())
    broadcast(other, group=group, group_src=1, algorithm=algorithm)
    return torch.equal(base, contribution(source, (5, 4), torch.float64)), other.tolist() == [2, 2]


@pytest.mark.parametrize("algorithm", ["naive", "tree"])
@pytest.mark.parametrize("source", [0, 2, 3])
def test_broadcast_copies_the_source_whatever_stride_the_tensors_have(four: Ranks, source: int, algorithm: str) -> None:
    with Recorder() as record:
        assert four.run(broadcast_from, source, algorithm) == [(True, True)] * 4
    assert sum(record.bytes_sent) == 2 * 160 + 2 * 16  # N - 1 copies of each
    if algorithm == "naive":
        assert record.bytes_sent[source] >= 2 * 160
    assert all(set(by) <= {"broadcast"} for by in record.bytes_by("operation"))


def disagree(what: str) -> None:
    second = dist.get_rank() == 1
    tensor = torch.ones(6)
    if what == "shape":
        all_reduce(torch.ones(7) if second else tensor)
    elif what == "dtype":
        all_reduce(tensor.double() if second else tensor)
    elif what == "operation":
        all_reduce(tensor, ReduceOp.MAX if second else ReduceOp.SUM)
    elif what == "algorithm":
        all_reduce(tensor, algorithm="naive" if second else "ring")
    elif what == "source":
        broadcast(tensor, 1 if second else 0)
    elif what == "call":
        broadcast(tensor, 0) if second else all_reduce(tensor)
    elif what == "barrier":
        barrier() if second else all_reduce(tensor)


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("shape", "all_reduce(float32 [6], SUM, ring)", "all_reduce(float32 [7], SUM, ring)"),
        ("dtype", "all_reduce(float32 [6], SUM, ring)", "all_reduce(float64 [6], SUM, ring)"),
        ("operation", "all_reduce(float32 [6], SUM, ring)", "all_reduce(float32 [6], MAX, ring)"),
        ("algorithm", "all_reduce(float32 [6], SUM, ring)", "all_reduce(float32 [6], SUM, naive)"),
        ("source", "broadcast(float32 [6], src=0, tree)", "broadcast(float32 [6], src=1, tree)"),
        ("call", "all_reduce(float32 [6], SUM, ring)", "broadcast(float32 [6], src=0, tree)"),
        ("barrier", "all_reduce(float32 [6], SUM, ring)", "barrier()"),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_call_different_things_are_told_both_and_nobody_hangs_or_dies(
    four: Ranks, size: int, what: str, first: str, second: str
) -> None:
    if size == 2:
        with Ranks(2, timeout=20) as two, pytest.raises(RankError) as caught:
            two.run(disagree, what)
    else:
        with pytest.raises(RankError) as caught:
            four.run(disagree, what)
    assert caught.value.kind == "exception"
    assert first in str(caught.value) and second in str(caught.value)


def refused(call: Any) -> None:
    call(torch.ones(4))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda t: all_reduce(t, algorithm="fast"), "algorithm 'fast' is not known; give one of"),
        (lambda t: all_reduce(t.long(), ReduceOp.AVG), "an average of torch.int64 is no torch.int64: convert it"),
        (lambda t: all_reduce(t, ReduceOp.BXOR), "is not known; give ReduceOp.SUM, AVG, PRODUCT, MAX or MIN"),
        (lambda t: broadcast(t), "give either src"),
        (lambda t: broadcast(t, 9), "src is rank 9, which is not in this group"),
        (lambda t: broadcast(t, 0, algorithm="ring"), "broadcast: algorithm 'ring' is not known; give one of"),
    ],
)
def test_bad_arguments_are_refused_on_all_ranks_in_one_sentence(four: Ranks, call: Any, sentence: str) -> None:
    with pytest.raises(RankError, match=sentence) as caught:
        four.run(refused, call)
    assert caught.value.ranks == [0, 1, 2, 3] and caught.value.type == "ValueError"


def test_a_reduce_scatter_into_the_ranks_own_part_leaves_the_same_bits_there(four: Ranks) -> None:
    """As NCCL's in place: no further memory, and what the others' parts are left with is not defined."""

    def run(length: int) -> tuple[bool, int]:
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = contribution(rank, (size * length,), torch.float32)
        apart = torch.empty(length)
        reduce_scatter_tensor(apart, mine)
        own = mine[rank * length : (rank + 1) * length]
        with Recorder() as record:
            reduce_scatter_tensor(own, mine)
        return torch.equal(own, apart), record.bytes_sent

    for length in (1, 5, LONG):
        assert four.run(run, length) == [(True, 4 * 3 * length)] * 4
