"""The life of ranks: how they start, how they end and are stopped, and what they can't be started with."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from ranks_helpers import wait_until

from labkit.ranks import RankError, Ranks, forking, launch


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as pool:
        yield pool


@pytest.fixture
def two() -> Iterator[Ranks]:
    """Ranks for a test that spoils them."""
    with Ranks(2) as pool:
        yield pool


# --- how they start ---


def test_ranks_are_forked_with_torch_loaded(two: Ranks) -> None:
    assert two.preloaded == []
    two.start()
    assert two.preloaded == [True, True]


def test_all_that_is_to_be_preloaded_was(two: Ranks) -> None:
    # an import error in the fork server is silent
    missing = two.run(lambda names: [name for name in names if name not in sys.modules], forking.PRELOAD)
    assert missing == [[], []]


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


# --- the stop button, in a script ---


def press(seconds: float) -> None:
    """Interrupt this process after so many seconds."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_an_interrupt_stops_a_call_and_keeps_what_the_ranks_hold(ranks: Ranks) -> None:
    ranks.push(memory="kept")
    press(0.2)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(time.sleep, 60)
    assert ranks.pull("memory") == ["kept"] * ranks.world_size


def test_a_call_right_after_an_interrupted_one_is_left_alone(two: Ranks) -> None:
    def work() -> str:
        for _ in range(50):
            time.sleep(0.01)
            dist.barrier()
        return "done"

    two.start()
    for _ in range(3):
        press(0.1)
        with pytest.raises(KeyboardInterrupt):
            two.run(time.sleep, 60)
        assert two.run(work) == ["done", "done"]


def test_an_interrupt_while_a_large_argument_is_on_its_way_damages_nothing(two: Ranks) -> None:
    two.start()
    much = torch.zeros(10_000_000)
    for seconds in (0.01, 0.03, 0.06):
        press(seconds)
        with pytest.raises(KeyboardInterrupt):
            two.run(lambda tensor: time.sleep(60), much)
        assert two.run(dist.get_rank) == [0, 1]


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the fork server")
def test_a_folder_for_temporary_files_whose_name_is_too_long_is_refused_in_a_sentence(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    script = "from labkit.ranks import Ranks\nif __name__ == '__main__':\n    Ranks(2).start()"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(long)}, capture_output=True, text=True
    )
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert said.startswith(f"RuntimeError: ranks can't start: the path of a socket in {long}/pymp-")
    assert said.endswith("set the environment variable TMPDIR to a folder with a shorter name, such as /tmp")
    assert not list(long.glob("labkit*")), "what was made before is removed"
