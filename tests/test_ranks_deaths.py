"""Ranks that don't stop, die, or wreck their own process: what is told, what is lost, and that the next call works."""

import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from ranks_helpers import failure, others, remembers, they_work, wait_until

from labkit.ranks import RankError, Ranks, calling
from labkit.ranks.errors import LOST


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as pool:
        yield pool


@pytest.fixture(autouse=True)
def remembering(ranks: Ranks) -> None:
    """Every test begins with ranks that remember something."""
    ranks.push(memory="kept")


# --- ranks that do not stop ---


def test_a_peer_that_stays_busy_is_shown_and_the_ranks_start_anew(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise ValueError("without the others")
        time.sleep(60)

    monkeypatch.setattr(calling, "GRACE", 0.5)
    error = failure(ranks, fail)
    first = fail.__code__.co_firstlineno
    verb = "is" if ranks.world_size == 2 else "are"
    assert str(error) == (
        f"rank 0 raised ValueError: without the others (test_ranks_deaths.py, line {first + 2}); "
        f"did not stop within 0.5 s: {others(ranks, 0)} {verb} busy, test_ranks_deaths.py, line {first + 3}: "
        f"time.sleep(60); {LOST}"
    )
    assert error.kind == "busy"
    assert error.type == "ValueError"
    assert error.details.count("was here:") == ranks.world_size - 1
    assert not remembers(ranks)
    assert they_work(ranks)


def test_a_peer_that_holds_pythons_lock_is_shown_too(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("without the others")
        ctypes.PyDLL(None).sleep(60)  # a call into C that keeps the lock

    monkeypatch.setattr(calling, "GRACE", 0.5)
    error = failure(ranks, fail)
    place = f"test_ranks_deaths.py, line {fail.__code__.co_firstlineno + 3}"
    assert f"inside code that holds Python's lock, {place}" in str(error)
    assert not remembers(ranks)


# --- deaths ---


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os._exit(7), "ended with exit code 7"),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV (test_ranks_deaths.py, line "),
        (lambda: os.abort(), "was killed by SIGABRT (test_ranks_deaths.py, line "),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL (out of memory, perhaps)"),
    ],
    ids=["exit", "segfault", "abort", "kill"],
)
def test_a_rank_that_dies_is_named_with_its_end_and_the_next_call_works(ranks: Ranks, end: Any, told: str) -> None:
    dying = ranks.world_size - 1

    def die() -> None:
        if dist.get_rank() == dying:
            end()
        dist.barrier()

    before = ranks.run(os.getpid)
    error = failure(ranks, die)
    assert str(error).startswith(f"rank {dying} {told}")
    assert str(error).endswith(LOST)
    assert (error.kind, error.ranks) == ("death", [dying])
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert not remembers(ranks)
    assert they_work(ranks)


def test_a_rank_that_dies_between_calls_is_noticed_at_the_next(ranks: Ranks) -> None:
    os.kill(ranks.run(os.getpid)[1], signal.SIGTERM)
    assert str(failure(ranks, os.getpid)).startswith("rank 1 was killed by SIGTERM")
    assert they_work(ranks)


def test_a_rank_that_dies_after_its_answer_ends_the_call(ranks: Ranks) -> None:
    def die_later() -> None:
        if dist.get_rank() == 0:
            sys.modules["threading"].Timer(0.2, os._exit, (5,)).start()
        else:
            time.sleep(60)

    assert str(failure(ranks, die_later)).startswith("rank 0 ended with exit code 5")


# --- what the learner's code does to its process ---


def test_a_rank_that_destroys_its_group_gets_a_new_one(ranks: Ranks) -> None:
    ranks.run(dist.destroy_process_group)
    assert they_work(ranks)
    assert remembers(ranks)


def test_a_rank_that_closes_or_replaces_its_output_gets_it_back(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    def wreck() -> None:
        os.close(1)
        os.close(2)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.stdout.close()

    ranks.run(wreck)
    ranks.run(print, "still here")
    assert capsys.readouterr().out.count("still here") == ranks.world_size
    assert they_work(ranks)


def test_a_rank_may_change_its_folder(ranks: Ranks) -> None:
    ranks.run(os.chdir, "/")
    assert ranks.run(os.getcwd) == ["/"] * ranks.world_size
    ranks.restart()
    assert ranks.run(os.getcwd) == [os.getcwd()] * ranks.world_size


def test_a_rank_starts_no_ranks(ranks: Ranks) -> None:
    assert "Ranks: this is a rank already; start ranks from the notebook" in str(failure(ranks, Ranks, 2))


def test_a_rank_that_dies_leaves_nothing_that_it_had_started(ranks: Ranks) -> None:
    def die() -> None:
        started, forked = subprocess.Popen(["sleep", "300"]), os.fork()
        if not forked:
            time.sleep(300)
        print(started.pid, forked, flush=True)
        os._exit(1)

    written = io.StringIO()
    with contextlib.redirect_stdout(written), pytest.raises(RankError):
        ranks.run(die)
    children = [int(pid) for line in written.getvalue().splitlines() for pid in line.split()[2:]]
    assert len(children) >= 2

    def runs(pid: int) -> bool:
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    wait_until(lambda: not any(map(runs, children)), "the children of the ranks are gone", 10)
