"""`send` and `recv` carry any tensor, refuse what does not fit in one sentence, and never hang or end the process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_groups import new_group

from labkit.collectives import barrier, irecv, isend, recv, send
from labkit.collectives.headers import _DTYPES, WORDS
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, timeout=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=20) as ranks:
        yield ranks


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 100).to(torch.float32).to(dtype).view(shape)


def there_and_back(tensors: list[torch.Tensor], targets: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rank 0 sends each to rank 1, which receives it into its target and sends that back into a new one."""
    found = []
    for tensor, target in zip(tensors, targets, strict=True):
        if dist.get_rank() == 0:
            send(tensor, 1)
            back = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
            assert recv(back, 1) == 1
        else:
            assert recv(target, 0) == 0
            send(target, 0)
            back = target
        found.append(back)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def test_any_shape_arrives_zero_sizes_and_eight_dims_included(two: Ranks) -> None:
    shapes = [(), (1,), (7,), (2, 3, 4), (0,), (3, 0, 2), (1, 2, 1, 2, 1, 2, 1, 2), (300_000,)]
    tensors = [numbered(*shape) for shape in shapes]
    for found in two.run(there_and_back, tensors, [torch.zeros_like(one) for one in tensors]):
        assert all(same(a, b) for a, b in zip(found, tensors, strict=True))


def test_any_dtype_arrives_to_the_bit(two: Ranks) -> None:
    tensors = [numbered(5, 3, dtype=dtype) for dtype in _DTYPES]
    for found in two.run(there_and_back, tensors, [torch.zeros_like(one) for one in tensors]):
        for a, b in zip(found, tensors, strict=True):
            assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def strided() -> list[bool]:
    base = numbered(6, 8)
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda t: t.t(),
        "every other column": lambda t: t[:, ::2],
        "a column": lambda t: t[:, 3],
        "a corner": lambda t: t[1:4, 2:5],
        "permuted": lambda t: t.view(2, 3, 8).permute(2, 0, 1),
        "channels last": lambda t: t.view(1, 2, 3, 8).contiguous(memory_format=torch.channels_last),
    }
    good = []
    for view in views.values():
        if dist.get_rank() == 0:
            send(view(base), 1)
            send(base[0].expand(4, 8), 1)
        else:
            whole = torch.full((6, 8), -1.0)
            target = view(whole)
            recv(target, 0)
            spread = torch.zeros(4, 8)
            recv(spread, 0)
            good.append(torch.equal(target, view(base)) and torch.equal(spread, base[0].expand(4, 8)))
            expected = torch.full((6, 8), -1.0)
            view(expected).copy_(view(base))
            good.append(torch.equal(whole, expected))  # what the view does not show is untouched
    return good


def test_any_stride_is_sent_and_received_into(two: Ranks) -> None:
    assert all(two.run(strided)[1])


def with_gradient() -> bool:
    parameter = torch.nn.Parameter(torch.zeros(3))
    if dist.get_rank() == 0:
        send(torch.ones(3, requires_grad=True) * 2, 1)
        return True
    recv(parameter, 0)
    return parameter.tolist() == [2, 2, 2] and parameter.requires_grad and parameter.grad_fn is None


def test_parameters_and_results_of_autograd_travel_without_their_graph(two: Ranks) -> None:
    assert two.run(with_gradient) == [True, True]


def one_message(sent: torch.Tensor, wanted: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        send(sent, 1)
    else:
        recv(wanted, 0)


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (torch.zeros(3), torch.zeros(4)),  # short: gloo alone would fill half of it
        (torch.zeros(4), torch.zeros(3)),  # long: gloo alone would end the process
        (torch.zeros(100_000), torch.zeros(1)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),  # as many bytes
        (torch.zeros(6), torch.zeros(2, 3)),
        (torch.zeros(()), torch.zeros(1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),  # gloo alone would reinterpret it
        (torch.zeros(2), torch.zeros(1, dtype=torch.float64)),
        (torch.zeros(0), torch.zeros(2)),
        (torch.zeros(2), torch.zeros(0)),
    ],
)
def test_another_shape_or_dtype_is_told_with_both_ranks_values(
    two: Ranks, sent: torch.Tensor, wanted: torch.Tensor
) -> None:
    with pytest.raises(RankError) as caught:
        two.run(one_message, sent, wanted)

    def words(tensor: torch.Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    assert (
        f"recv: rank 0 sends {words(sent)} but rank 1 expects {words(wanted)}: give both the same shape and dtype"
    ) in str(caught.value)
    assert caught.value.kind == "exception" and caught.value.ranks == [1]
    # and the ranks go on
    assert [one.tolist() for (one,) in two.run(there_and_back, [torch.ones(2)], [torch.zeros(2)])] == [[1, 1]] * 2


BAD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "itself": (lambda t: send(t, 0), "dst is rank 0 itself: a rank can't send to itself, copy the tensor instead"),
    "from itself": (lambda t: recv(t, 0), "src is rank 0 itself"),
    "unknown": (lambda t: send(t, 2), r"dst is rank 2, which is not in this group; it has the ranks \[0, 1\]"),
    "below zero": (lambda t: recv(t, -1), "src is rank -1, which is not in this group"),
    "in the group": (lambda t: send(t, group_dst=5), "group_dst is 5; the group has ranks 0 to 1"),
    "both": (lambda t: send(t, 1, group_dst=1), r"give either dst \(a global rank\) or group_dst"),
    "neither": (lambda t: recv(t), r"give either src \(a global rank\) or group_src"),
    "tag": (lambda t: send(t, 1, tag=-1), "tag is -1; give one from 0 to"),
    "large tag": (lambda t: irecv(t, 1, tag=1 << 28), "tag is 268435456; give one from 0 to 268435455"),
    "dims": (lambda t: send(t.view(*[1] * 9), 1), "a tensor of 9 dims can't be sent; flatten it to at most 8"),
    "dtype": (lambda t: isend(t.to(torch.uint16), 1), "a tensor of dtype torch.uint16 can't be sent; convert it first"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(two: Ranks, what: str) -> None:
    call, sentence = BAD[what]

    def on_rank_zero(call: Any) -> None:
        if dist.get_rank() == 0:
            with Recorder() as record:
                try:
                    call(torch.zeros(1))
                finally:
                    assert not record.transfers

    with pytest.raises(RankError, match=sentence) as caught:
        two.run(on_rank_zero, call)
    assert caught.value.type == "ValueError" and caught.value.ranks == [0]


def test_without_ranks_there_is_one_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"there are no ranks here: run this with labkit\.ranks\.launch"):
        send(torch.zeros(1), 1)


def tags_out_of_order() -> list[float]:
    if dist.get_rank() == 0:
        works = [isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (3, 7, 0)]
        for work in works:
            work.wait()
        return []
    found = []
    for tag in (0, 3, 7):
        target = torch.zeros(1)
        recv(target, 0, tag=tag)
        found.append(target.item())
    return found


def test_tags_tell_messages_apart_whatever_their_order(two: Ranks) -> None:
    assert two.run(tags_out_of_order)[1] == [0, 3, 7]


def many_at_once(count: int) -> tuple[list[float], bool]:
    """Every rank has `count` messages under way to and from every other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [one for one in range(world) if one != rank]
    targets = {(peer, turn): torch.zeros(50) for peer in others for turn in range(count)}
    works = [irecv(targets[peer, turn], peer) for turn in range(count) for peer in others]
    works += [isend(torch.full((50,), 100.0 * rank + turn), peer) for turn in range(count) for peer in others]
    for work in works:
        work.wait()
        work.wait()  # a second time does nothing
    done = all(work.is_completed() for work in works)
    return [targets[peer, turn][-1].item() - 100 * peer - turn for peer, turn in targets], done


def test_many_messages_may_be_under_way_both_ways_and_keep_their_order(four: Ranks) -> None:
    for differences, done in four.run(many_at_once, 20):
        assert set(differences) == {0.0} and done


def in_a_group() -> Any:
    """Ranks 1 and 3 talk in their own group, 0 and 2 in theirs, at the same time."""
    rank = dist.get_rank()
    pairs = [new_group([0, 2]), new_group([1, 3], "odd")]
    mine = pairs[rank % 2]
    target = torch.zeros(3)
    with Recorder() as record:
        if rank < 2:
            send(torch.full((3,), float(rank)), group=mine, group_dst=1)
        else:
            assert recv(target, rank - 2, mine) == rank - 2
    try:
        send(target, 0 if rank != 0 else 1, pairs[1])
    except (ValueError, RuntimeError) as error:
        return target.tolist(), record.ranks[0].bytes_by("group", "peer"), str(error)


def test_groups_are_named_and_take_global_ranks_or_their_own(four: Ranks) -> None:
    answers = four.run(in_a_group)
    assert [answer[0] for answer in answers] == [[0] * 3, [0] * 3, [0] * 3, [1] * 3]
    assert [answer[1] for answer in answers] == [{("ranks 0,2", 2): 12}, {("odd", 3): 12}, {}, {}]
    stranger = "this rank is not a member of the group: call the collective on the group's ranks only"
    outside = "dst is rank 0, which is not in this group; it has the ranks [1, 3]"
    assert [answer[2] for answer in answers] == [stranger, outside, stranger, outside]


def test_a_message_counts_its_bytes_and_its_header_apart(two: Ranks) -> None:
    with Recorder() as record:
        two.run(one_message, torch.zeros(5, 7, dtype=torch.float64), torch.zeros(5, 7, dtype=torch.float64))
    assert record.bytes_sent == [280, 0] and record.bytes_received == [0, 280] and record.messages == [1, 0]
    assert record.control_bytes == [8 * WORDS, 0] and record.control_messages == [1, 0]
    assert {(one.rank, one.kind, one.name, one.details["group"]) for one in record.events} == {
        (0, "communication", "send", "world"),
        (1, "communication", "recv", "world"),
    }


def test_without_checks_there_are_no_headers() -> None:
    with Ranks(2, timeout=20, check=False) as ranks, Recorder() as record:
        (back,), _ = ranks.run(there_and_back, [numbered(5)], [torch.zeros(5)])
    assert back.tolist() == numbered(5).tolist()
    assert record.messages == [1, 1] and record.control_messages == [0, 0]


def late_rank() -> float:
    """Rank 1 is late; the barrier holds rank 0 until it comes."""
    import time

    if dist.get_rank() == 1:
        time.sleep(0.2)
        come = time.perf_counter()
        barrier()
        return come
    barrier()
    return time.perf_counter()


def test_a_barrier_lets_nobody_pass_before_all_have_come_and_carries_no_payload(two: Ranks) -> None:
    with Recorder() as record:
        passed, come = two.run(late_rank)
    assert passed >= come  # on the clock that processes of one machine share
    assert record.bytes_sent == [0, 0] and record.messages == [0, 0]
    assert all(count > 0 for count in record.control_messages)
    assert {one.name for one in record.events} == {"barrier"}
