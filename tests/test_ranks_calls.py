"""Calls on ranks: what goes there, what comes back, what is kept between calls, and what is recorded."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

from labkit import collectives
from labkit.ranks import RankError, Ranks, channel, launch
from labkit.record import Recorder


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as pool:
        yield pool


@pytest.fixture
def two() -> Iterator[Ranks]:
    """Ranks for a test that spoils them."""
    with Ranks(2) as pool:
        yield pool


# --- there and back ---


def test_results_come_in_rank_order(ranks: Ranks) -> None:
    assert ranks.run(lambda factor, offset=0: factor * dist.get_rank() + offset, 10, offset=1) == [
        10 * rank + 1 for rank in range(ranks.world_size)
    ]


def test_launch_starts_calls_and_ends_ranks() -> None:
    (first, _), (second, pid) = launch(lambda word: (word, os.getpid()), 2, "hello")
    assert first == second == "hello"
    assert not psutil.pid_exists(pid)


@dataclass
class Point:
    x: float
    tensor: torch.Tensor


def test_a_dataclass_survives_the_way_there_and_back(ranks: Ranks) -> None:
    @dataclass
    class Local:
        x: float

    def move(local: Local, point: Point) -> tuple[Local, Point]:
        assert isinstance(local, Local)
        return Local(local.x + 1), Point(point.x + 1, point.tensor + 1)

    for local, point in ranks.run(move, Local(1.0), Point(2.0, torch.zeros(2))):
        assert local == Local(2.0)
        assert isinstance(point, Point)
        assert (point.x, point.tensor.tolist()) == (3.0, [1.0, 1.0])


TENSORS = {
    "float": torch.tensor([1.5, -2.0]),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]).conj(),
    "transposed": torch.arange(6.0).view(2, 3).t()[1:],
    "sparse": torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_arrives_as_it_is(ranks: Ranks, name: str) -> None:
    for tensor in ranks.run(lambda one: one, TENSORS[name]):
        assert (tensor.dtype, tensor.shape, tensor.layout) == (
            TENSORS[name].dtype,
            TENSORS[name].shape,
            TENSORS[name].layout,
        )
        assert torch.equal(tensor.to_dense(), TENSORS[name].to_dense())


def test_of_a_view_only_what_it_shows_comes_back() -> None:
    whole = torch.zeros(1000, 1000)
    assert len(channel.pack(whole[0])) < 10_000
    row = channel.unpack(channel.pack(whole[0]))
    row += 1
    assert whole.sum() == 0


def test_a_parameter_stays_one_tied_ones_stay_tied_and_a_graph_is_left_behind() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    one, other = channel.unpack(channel.pack((first, second)))
    assert one.weight is other.weight
    assert isinstance(one.weight, torch.nn.Parameter)
    assert one.weight.requires_grad
    assert not channel.unpack(channel.pack(first.weight * 2)).requires_grad


def test_large_arguments_and_results_travel_whole(two: Ranks) -> None:
    sent = torch.arange(12_000_000, dtype=torch.int32)
    for back in two.run(lambda tensor: tensor + dist.get_rank(), sent):
        assert back.numel() == sent.numel()
        assert back[-1] - back[0] == sent[-1]


# --- what is kept ---


def test_names_persist_between_cells_until_the_restart(two: Ranks) -> None:
    two.run_cell("seen = [rank]")
    assert two.run_cell("seen.append(world_size); seen") == ["[0, 2]", "[1, 2]"]
    two.push(word="pushed", seen=None)
    assert two.pull("word") == ["pushed", "pushed"]
    two.restart()
    with pytest.raises(RankError, match="name 'word' is not defined on this rank: define it in a %%ranks cell"):
        two.pull("word")


def test_a_cell_can_run_on_some_ranks_only(ranks: Ranks) -> None:
    ranks.push(here=0)
    assert ranks.run_cell("here = 1; rank", on=[1]) == ["1"]
    assert ranks.pull("here") == [0, 1, 0, 0][: ranks.world_size]
    with pytest.raises(ValueError, match=f"there are ranks 0 to {ranks.world_size - 1}"):
        ranks.run_cell("1", on=[0, 9])


@pytest.mark.parametrize(
    ("code", "value"),
    [("1 + 1", "2"), ("1 + 1;", None), ("x = 3", None), ("None", None), ("", None), ("def f(): pass\nf()", None)],
)
def test_a_cell_has_the_value_of_its_last_expression(ranks: Ranks, code: str, value: str | None) -> None:
    assert ranks.run_cell(code) == [value] * ranks.world_size


def test_a_mistake_in_the_syntax_of_a_cell_names_its_line(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"all ranks raised SyntaxError: .* \(line 2\)"):
        ranks.run_cell("x = 1\nx = = 2")


def test_a_call_works_after_the_caller_computed_with_all_its_threads(two: Ranks) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1500, 1500) @ torch.ones(1500, 1500)
        assert two.run(lambda: float((torch.ones(300, 300) @ torch.ones(300, 300))[0, 0])) == [300.0, 300.0]
    finally:
        torch.set_num_threads(before)


def test_a_data_loader_with_workers_runs_in_a_rank_on_a_dataset_of_the_notebook(ranks: Ranks) -> None:
    class Squares(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index * index

    def load() -> int:
        loader = torch.utils.data.DataLoader(Squares(), 2, num_workers=2)
        return sum(int(batch.sum()) for batch in loader)

    assert ranks.run(load) == [140] * ranks.world_size


# --- looks, and records ---


def test_the_object_shows_what_its_ranks_do(two: Ranks) -> None:
    assert repr(two) == "Ranks(2, backend='gloo'): not started"
    assert two._repr_html_().count("not started") == 3
    two.start()
    assert two._repr_html_().count("idle") == 2
    assert " MB" in two._repr_html_()


def test_an_emulated_network_shows_in_the_object() -> None:
    network = collectives.Network(latency_us=5, bandwidth_gbit_s=1)
    assert repr(Ranks(2, network=network)) == "Ranks(2, backend='gloo', network=(5 us, 1 Gbit/s)): not started"


def test_a_record_is_merged_over_the_ranks_and_over_calls(ranks: Ranks) -> None:
    def pass_on(size: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        sending = collectives.isend(torch.zeros(size * (rank + 1)), (rank + 1) % world_size)
        collectives.recv(torch.zeros(size * ((rank - 1) % world_size + 1)), (rank - 1) % world_size)
        sending.wait()

    with Recorder() as record:
        ranks.run(pass_on, 10)
        ranks.run(pass_on, 100)
    ranks.run(pass_on, 1000)
    size = ranks.world_size
    assert record.bytes_sent == [4 * 110 * (rank + 1) for rank in range(size)]
    assert record.bytes_received == [4 * 110 * ((rank - 1) % size + 1) for rank in range(size)]
    assert record.messages == [2] * size
    assert [one.rank for one in record.ranks] == list(range(size))
    assert record.ranks[1].bytes_by("peer") == {2 % size: 880}


def test_what_was_recorded_before_an_error_is_kept(ranks: Ranks) -> None:
    def send_and_fail() -> None:
        if dist.get_rank() == 0:
            collectives.send(torch.zeros(5), 1)
        elif dist.get_rank() == 1:
            collectives.recv(torch.zeros(5), 0)
        raise ValueError("after that")

    with Recorder() as record, pytest.raises(RankError):
        ranks.run(send_and_fail)
    assert record.bytes_sent == [20, 0, 0, 0][: ranks.world_size]


def test_the_ranks_clocks_are_ours(two: Ranks) -> None:
    before = time.perf_counter()
    with Recorder() as record:
        two.run(lambda: collectives.barrier())
    assert all(before < span.start < span.end < time.perf_counter() for span in record.events)
    assert {span.rank for span in record.events} == {0, 1}
