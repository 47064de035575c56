"""Calls on ranks: what goes there, what comes back, what is kept between calls, and what is refused."""

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from ranks_helpers import wait_until

from labkit import collectives
from labkit.ranks import RankError, Ranks, channel, forking, launch
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


# --- how they start ---


def test_ranks_are_forked_with_torch_loaded(two: Ranks) -> None:
    assert two.preloaded == []
    two.start()
    assert two.preloaded == [True, True]


def test_all_that_is_to_be_preloaded_was(two: Ranks) -> None:
    # an import error in the fork server is silent
    missing = two.run(lambda names: [name for name in names if name not in sys.modules], forking.PRELOAD)
    assert missing == [[], []]


def test_where_nothing_can_be_forked_ranks_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "METHOD", "spawn")
    with Ranks(1) as one:
        assert one.run(lambda: dist.get_world_size()) == [1]
        assert one.preloaded == [False]


def test_a_rank_has_one_thread_its_callers_environment_and_numbers_of_its_own(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_SOMETHING", "set later")
    names = ("LABKIT_SOMETHING", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    assert two.run(lambda: [os.environ[name] for name in names]) == [
        ["set later", "0", "2", "1"],
        ["set later", "1", "2", "1"],
    ]
    assert two.run(torch.get_num_threads) == [1, 1]
    first, second = two.run(lambda: np.random.random())
    assert first != second


def test_threads_are_as_asked_for() -> None:
    with Ranks(1, threads=2) as one:
        assert one.run(torch.get_num_threads) == [2]


# --- how they end ---


def test_ranks_that_nobody_refers_to_any_more_end() -> None:
    pool = Ranks(2)
    processes, watched = [psutil.Process(pid) for pid in pool.run(os.getpid)], weakref.ref(pool)
    del pool
    gc.collect()
    assert watched() is None
    assert not any(process.is_running() for process in processes)


def test_closed_ranks_start_again_at_the_next_call(two: Ranks) -> None:
    first = two.run(os.getpid)
    two.close()
    two.close()
    assert "not started" in repr(two)
    assert set(two.run(os.getpid)).isdisjoint(first)


def test_closing_them_in_another_thread_ends_a_call(two: Ranks) -> None:
    two.start()
    threading.Timer(0.3, two.close).start()
    with pytest.raises(RankError, match=r"^the ranks were closed during this call$"):
        two.run(time.sleep, 60)
    assert two.run(lambda: 1) == [1, 1]


def test_ranks_do_one_thing_at_a_time_whatever_thread_asks(two: Ranks, tmp_path: Path) -> None:
    go_on, begun = tmp_path / "go on", tmp_path / "begun"

    def wait() -> str:
        begun.touch()
        while not go_on.exists():
            time.sleep(0.01)
        return "done"

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(two.run(wait)))
    thread.start()
    wait_until(begun.exists, "the other thread's call runs")
    assert "busy" in two._repr_html_()
    with pytest.raises(RuntimeError, match="these ranks are busy with another call"):
        two.run(lambda: 1)
    go_on.touch()
    thread.join()
    assert results == [["done", "done"]]


def test_ranks_of_several_threads_start_side_by_side() -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(launch(dist.get_rank, 2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[0, 1]] * 3


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"world_size": 0}, "world_size is 0; give a whole number of ranks from 1 to 64"),
        ({"world_size": 2.0}, r"world_size is 2\.0; give a whole number"),
        ({"world_size": True}, "world_size is True; give a whole number"),
        ({"backend": "mpi"}, r"backend is 'mpi'; give 'gloo' \(CPU\) or 'nccl'"),
        ({"timeout": 0}, "timeout is 0; give seconds above 0"),
        ({"timeout": float("inf")}, "timeout is inf; give seconds above 0"),
        ({"timeout": "60"}, "timeout is '60'; give seconds above 0"),
        ({"network": "fast"}, "network is a str; give a labkit.collectives.Network or None"),
        ({"threads": 0}, "threads is 0; give the torch threads of each rank"),
    ],
    ids=str,
)
def test_what_ranks_cant_be_started_with_is_refused_in_a_sentence(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^Ranks: {told}"):
        Ranks(**{"world_size": 2, **arguments})


def test_nccl_without_a_gpu_for_every_rank_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="'nccl' needs a GPU for each of the 2 ranks and this machine has 1: use"):
        Ranks(2, backend="nccl")


def test_a_function_that_was_called_already_is_refused(two: Ranks) -> None:
    with pytest.raises(TypeError, match="give a function and its arguments, not a int"):
        two.run(3)  # type: ignore[arg-type]


def test_an_argument_that_cant_travel_is_refused_before_any_rank_starts(two: Ranks) -> None:
    with pytest.raises(TypeError, match="an argument can't be sent to the ranks: cannot pickle"):
        two.run(print, threading.Lock())
    assert "not started" in repr(two)


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
