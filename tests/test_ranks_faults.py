"""What happens when things go wrong on the ranks: the right cause, at once, in one line; and what is kept."""

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
import torch
import torch.distributed as dist
from ranks_helpers import wait_until
from torch.distributed.device_mesh import init_device_mesh

from labkit import collectives
from labkit.ranks import RankError, Ranks, calling
from labkit.ranks.errors import LOST
from labkit.ranks.reports import STALE


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as pool:
        yield pool


@pytest.fixture(autouse=True)
def remembering(ranks: Ranks) -> None:
    """Every test begins with ranks that remember something."""
    ranks.push(memory="kept")


def remembers(ranks: Ranks) -> bool:
    """Whether the ranks still hold what they held when the test began."""
    try:
        return ranks.pull("memory") == ["kept"] * ranks.world_size
    except RankError as error:
        assert error.type == "NameError"
        return False


def are_freed(ranks: Ranks, error: RankError) -> bool:
    """Whether the others stopped by themselves after a failure: else they would have been killed after 2 s."""
    return error.kind == "exception" and remembers(ranks)


def they_work(ranks: Ranks) -> bool:
    """Whether the ranks can talk to each other."""

    def add_up() -> float:
        ones = torch.ones(1)
        collectives.all_reduce(ones)
        return ones.item()

    return ranks.run(add_up) == [ranks.world_size] * ranks.world_size


def failure(ranks: Ranks, function: Any, *arguments: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        ranks.run(function, *arguments)
    assert "\n" not in str(caught.value)
    return caught.value


def others(ranks: Ranks, but: int) -> str:
    """The other ranks as errors name them."""
    named = [rank for rank in range(ranks.world_size) if rank != but]
    if len(named) == 1:
        return f"rank {named[0]}"
    return f"ranks {named[0]}-{named[-1]}" if named == list(range(named[0], named[-1] + 1)) else "ranks 0, 2 and 3"


# --- exceptions ---


def test_the_same_exception_on_all_ranks_is_one_and_keeps_state_and_groups(ranks: Ranks) -> None:
    ranks.run_cell("pair = dist.new_group(list(range(world_size)))")

    def fail() -> None:
        raise ValueError("nobody can do this")

    error = failure(ranks, fail)
    line = fail.__code__.co_firstlineno + 1
    assert str(error) == f"all ranks raised ValueError: nobody can do this (test_ranks_faults.py, line {line})"
    assert (error.kind, error.type, error.ranks) == ("exception", "ValueError", list(range(ranks.world_size)))
    assert isinstance(error.exception, ValueError)
    assert error.details.count("Traceback") == 1
    assert remembers(ranks)
    assert ranks.run_cell("dist.all_reduce(torch.ones(1), group=pair)") == [None] * ranks.world_size


def test_the_same_exception_a_moment_apart_keeps_the_groups_too(ranks: Ranks) -> None:
    ranks.run_cell("pair = dist.new_group(list(range(world_size)))")

    def fail() -> None:
        time.sleep(0.1 * dist.get_rank())
        raise ValueError("one after the other")

    assert str(failure(ranks, fail)).startswith("all ranks raised ValueError: one after the other")
    assert ranks.run_cell("dist.all_reduce(torch.ones(1), group=pair)") == [None] * ranks.world_size


@pytest.mark.parametrize("library", [dist, collectives], ids=["torch", "labkit"])
def test_when_one_rank_raises_those_that_wait_for_it_are_freed_at_once(ranks: Ranks, library: Any) -> None:
    def fail(name: str) -> None:
        if dist.get_rank() == 1:
            raise KeyError("only here")
        sys.modules[name].all_reduce(torch.ones(3))

    error = failure(ranks, fail, library.__name__)
    line = fail.__code__.co_firstlineno + 2
    assert str(error) == f"rank 1 raised KeyError: 'only here' (test_ranks_faults.py, line {line})"
    assert error.ranks == [1]
    assert f"rank 0 was waiting in all_reduce, test_ranks_faults.py, line {line + 1}" in error.details.replace(
        " for rank 1", ""
    ).replace(" for rank 3", "")
    assert are_freed(ranks, error)
    assert they_work(ranks)


def test_a_rank_that_waits_for_one_that_waits_for_the_failed_one_is_freed_too(ranks: Ranks) -> None:
    def fail_in_a_row() -> None:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        if rank == 0:
            raise OSError("the first one")
        dist.recv(torch.zeros(1), rank - 1)
        if rank < last:
            dist.send(torch.zeros(1), rank + 1)

    error = failure(ranks, fail_in_a_row)
    assert str(error).startswith("rank 0 raised OSError: the first one")
    assert are_freed(ranks, error)


def test_ranks_that_wait_while_a_wrapper_a_mesh_and_a_pending_receive_hold_the_group_are_freed(ranks: Ranks) -> None:
    def fail() -> None:
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        pending = dist.irecv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())
        if dist.get_rank() == 0:
            raise ValueError("while much refers to the group")
        dist.barrier()
        print(module, mesh, pending)

    error = failure(ranks, fail)
    assert str(error).startswith("rank 0 raised ValueError: while much")
    assert are_freed(ranks, error)
    assert they_work(ranks)


def test_the_earliest_error_is_the_cause_where_ranks_raise_different_ones(ranks: Ranks) -> None:
    def fail() -> None:
        rank = dist.get_rank()
        if rank > 1:
            return
        if rank == 0:
            time.sleep(0.3)
        raise [RuntimeError, TypeError][rank](f"from rank {rank}")

    error = failure(ranks, fail)
    assert str(error).startswith("rank 1 raised TypeError: from rank 1")
    assert "rank 0 raised RuntimeError: from rank 0" in error.details


def test_a_failure_in_a_subgroup_names_its_rank(ranks: Ranks) -> None:
    def fail() -> None:
        group: Any = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            collectives.recv(torch.zeros(2), 1, group)
        elif dist.get_rank() == 1:
            raise ValueError("in the subgroup")

    error = failure(ranks, fail)
    assert str(error).startswith("rank 1 raised ValueError: in the subgroup")
    assert "rank 0 was waiting for rank 1 in recv" in error.details
    assert they_work(ranks)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Bound(Exception):
    def __init__(self) -> None:
        super().__init__("tied to its process")
        self.lock = sys.modules["threading"].Lock()


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: (_ for _ in ()).throw(GeneratorExit), "GeneratorExit"),
        (lambda: (_ for _ in ()).throw(KeyboardInterrupt), "KeyboardInterrupt"),
        (lambda: (_ for _ in ()).throw(Mute()), "Mute: (its text can't be shown: __str__ raised RuntimeError)"),
        (lambda: (_ for _ in ()).throw(Bound()), "Bound: tied to its process"),
        (lambda: (_ for _ in ()).throw(ValueError(f"an {object()}")), "ValueError: an <object object>"),
        (lambda: (_ for _ in ()).throw(ValueError("two\nlines")), "ValueError: two"),
    ],
    ids=["sys.exit", "generator", "interrupt", "mute", "unpicklable", "address", "lines"],
)
def test_whatever_is_raised_becomes_one_line_and_the_ranks_live_on(ranks: Ranks, raised: Any, told: str) -> None:
    def fail() -> None:
        raised()

    assert str(failure(ranks, fail)).startswith(f"all ranks raised {told} (test_ranks_faults.py, line ")
    assert remembers(ranks)


def test_endless_recursion_is_an_error_like_others(ranks: Ranks) -> None:
    def fall() -> None:
        fall()

    assert str(failure(ranks, fall)).startswith("all ranks raised RecursionError: maximum recursion depth exceeded")
    assert remembers(ranks)


def test_the_text_of_an_error_is_the_same_in_every_run(ranks: Ranks) -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise ValueError("once more")
        dist.barrier()

    assert str(failure(ranks, fail)) == str(failure(ranks, fail))


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
        f"rank 0 raised ValueError: without the others (test_ranks_faults.py, line {first + 2}); "
        f"did not stop within 0.5 s: {others(ranks, 0)} {verb} busy, test_ranks_faults.py, line {first + 3}: "
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
    place = f"test_ranks_faults.py, line {fail.__code__.co_firstlineno + 3}"
    assert f"inside code that holds Python's lock, {place}" in str(error)
    assert not remembers(ranks)


# --- deaths ---


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os._exit(7), "ended with exit code 7"),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV (test_ranks_faults.py, line "),
        (lambda: os.abort(), "was killed by SIGABRT (test_ranks_faults.py, line "),
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


# --- results and arguments that can't travel ---


def test_an_unpicklable_result_is_a_labelled_type_error_and_keeps_the_state(ranks: Ranks) -> None:
    def generate() -> Any:
        return (number for number in range(3))

    with pytest.raises(TypeError) as caught:
        ranks.run(generate)
    assert isinstance(caught.value, RankError)
    assert str(caught.value).startswith("all ranks raised TypeError: a result of type generator can't be sent back")
    assert remembers(ranks)


class Stubborn:
    """Can be rebuilt only where `home` says."""

    def __init__(self, home: str) -> None:
        self.home = home

    def __reduce__(self) -> Any:
        def rebuild(home: str) -> int:
            if home != ("rank" if "RANK" in os.environ else "notebook"):
                raise OSError(f"only in the {home}")
            return 1

        return rebuild, (self.home,)


def test_an_argument_that_cant_be_rebuilt_is_a_labelled_error(ranks: Ranks) -> None:
    error = failure(ranks, lambda one: one, Stubborn("notebook"))
    cause = "the function or an argument can't be rebuilt on the ranks (OSError: only in the notebook)"
    assert str(error).startswith(f"all ranks raised TypeError: {cause}")
    assert remembers(ranks)


def test_a_result_that_cant_be_rebuilt_is_a_labelled_error(ranks: Ranks) -> None:
    error = failure(ranks, lambda: Stubborn("rank"))
    assert str(error).startswith("the result of rank 0 can't be rebuilt here (OSError: only in the rank)")
    assert remembers(ranks)


# --- what outlives its group ---


@pytest.mark.parametrize(
    ("build", "use"),
    [
        ("old = dist.group.WORLD", "from labkit import collectives; collectives.all_reduce(torch.ones(1), group=old)"),
        ("old = dist.group.WORLD", "dist.all_reduce(torch.ones(1), group=old)"),
        (
            "old = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))",
            "old(torch.ones(1, 2)).sum().backward()",
        ),
        (
            "from torch.distributed.device_mesh import init_device_mesh\n"
            "old = init_device_mesh('cpu', (world_size // 2, 2), mesh_dim_names=('a', 'b'))['b']",
            # the new one must not be taken for the old
            "new = init_device_mesh('cpu', (2, world_size // 2), mesh_dim_names=('a', 'b'))\nold.get_group()",
        ),
        (
            "from torch.distributed.fsdp import fully_shard\nold = fully_shard(torch.nn.Linear(4, 4))",
            "old(torch.ones(1, 4))",
        ),
    ],
    ids=["labkit", "torch", "DDP", "mesh", "FSDP"],
)
def test_a_wrapper_or_mesh_that_outlives_its_group_says_so(ranks: Ranks, build: str, use: str) -> None:
    ranks.run_cell(build)
    with pytest.raises(RankError, match="rank 0 raised"):
        ranks.run_cell("if rank == 0: raise ValueError('the group is gone after this')")
    with pytest.raises(RankError) as caught:
        ranks.run_cell(use)
    assert STALE in str(caught.value)
    assert "\n" not in str(caught.value)


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
        children = [subprocess.Popen(["sleep", "300"]), os.fork()]
        if not children[1]:
            time.sleep(300)
        print(children[0].pid, children[1], flush=True)
        os._exit(1)

    written = io.StringIO()
    with contextlib.redirect_stdout(written), pytest.raises(RankError):
        ranks.run(die)
    children = [int(pid) for line in written.getvalue().splitlines() for pid in line.split()[2:]]
    assert len(children) >= 2

    def runs(pid: int) -> bool:
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    wait_until(lambda: not any(map(runs, children)), "the children of the ranks are gone", 10)
