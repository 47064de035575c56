"""Several processes want one set: one fetches, the others wait, and none of them waits for nothing."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty_server import HASTY

from labkit.data import fetching
from labkit.data.errors import DataError
from labkit.data.fetching import fetch, path
from labkit.data.registry import RegistryEntry
from labkit.data.turns import current_job, local_rank

pytest_plugins = ["faulty_server"]


FETCH = """
import os, sys
from labkit.data import Patience, RegistryEntry, RemoteFile, fetch
url, digest, size, processes = sys.argv[1:]
files = (RemoteFile(url, digest, int(size)),)
entry = RegistryEntry(name="mini", kind="image", title="", licence="", source="", files=files, folder="imagenette2-160")
for _ in range(int(processes) - 1):
    if os.fork() == 0:
        break
print(fetch(entry, rank=0, job="job", patience=Patience(read=60)), flush=True)
"""


def start(entry: RegistryEntry, processes: int) -> "subprocess.Popen[str]":
    """So many processes that fetch at once; one interpreter forks into them, as its imports take the longest."""
    (file,) = entry.files
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, file.url, file.digest, str(file.size), str(processes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, what: str) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def test_of_two_processes_at_once_one_downloads_and_the_other_finds_the_set(server, entry):
    server.always = "wait"
    both = start(entry, 2)
    said_waiting = threading.Event()

    def listen():
        for line in both.stderr:
            if "Another process is fetching mini; waiting for it." in line:
                said_waiting.set()

    listener = threading.Thread(target=listen)
    listener.start()
    # the download stands still until the other process says that it waits, or, if there were no lock, asks as well
    wait_for(lambda: said_waiting.is_set() or len(server.requests) > 1, "nobody waits")
    server.go.set()
    listener.join(60)
    assert both.wait(60) == 0
    assert both.stdout.read() == f"{path(entry)}\n" * 2
    assert server.requests == [""]


def test_when_rank_0_is_killed_the_waiting_ranks_say_so(server, entry):
    server.always = "wait"
    leader = start(entry, 1)
    wait_for(lambda: server.requests, "rank 0 asks for nothing")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(fetch, entry, rank=1, job="job", progress=False)
        time.sleep(0.5)
        assert not waiting.done()
        leader.kill()
        leader.communicate()
        with pytest.raises(DataError, match="Rank 0 died while it fetched mini"):
            waiting.result(timeout=30)


def on_ranks(entry: RegistryEntry, ranks: "list[int]", **options) -> "list[Path | str]":
    """What `fetch` gives each rank, or its sentence; the ranks begin in the order given."""

    def one(rank):
        try:
            return fetch(entry, rank=rank, job="job", progress=False, patience=HASTY, **options)
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = []
        for rank in ranks:
            futures.append(pool.submit(one, rank))
            time.sleep(0.3)
        return [future.result(timeout=60) for future in futures]


def test_rank_0_fetches_and_the_others_wait_for_it(server, entry, tmp_path):
    assert set(on_ranks(entry, [2, 1, 0, 3])) == {path(entry)}
    assert server.requests == [""]
    left = [file.name for file in (tmp_path / "cache" / "locks").iterdir()]
    assert left == ["mini.lock"], "no claim is left that a later job could take for its own"


def test_when_rank_0_fails_every_rank_ends_with_the_same_sentence(server, entry):
    server.always = "404"
    (one_sentence,) = set(on_ranks(entry, [1, 2, 0], settle=60))
    assert "404 Not Found" in str(one_sentence)
    assert len(server.requests) == 1


def test_a_rank_that_comes_late_learns_of_the_failure_too(server, entry):
    server.always = "404"
    first, late = on_ranks(entry, [0, 1], settle=0.5)
    assert first == late and "404" in str(first)


def test_an_earlier_failure_does_not_end_the_next_try(server, entry):
    server.faults = ["404"]
    (failed,) = on_ranks(entry, [0])
    assert "404" in str(failed)
    assert on_ranks(entry, [1, 0]) == [path(entry)] * 2


def test_an_error_that_nobody_foresaw_reaches_the_other_ranks_too(entry, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(fetching, "download", broken)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(fetch, entry, rank=1, job="job", settle=0.5)
        with pytest.raises(ZeroDivisionError):
            fetch(entry, rank=0, job="job", progress=False)
        with pytest.raises(DataError, match="Rank 0 failed while it fetched mini: ZeroDivisionError"):
            waiting.result(timeout=30)


def test_the_failure_of_another_job_is_not_ours(server, entry):
    server.always = "404"
    with pytest.raises(DataError):
        fetch(entry, rank=0, job="another", progress=False, patience=HASTY)
    with pytest.raises(DataError, match="Rank 0 has not begun to fetch mini within 0 s"):
        fetch(entry, rank=1, job="job", start_timeout=0.4, settle=0)


def test_the_rank_comes_from_the_launcher(entry, monkeypatch):
    monkeypatch.setenv("RANK", "5")
    assert local_rank() == 5
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_rank() == 1
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert current_job().endswith("-29511-") and str(os.getppid()) in current_job()
    with pytest.raises(DataError, match="Rank 0 has not begun"):
        fetch(entry, start_timeout=0)
