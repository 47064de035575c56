"""What happens when things go wrong on the ranks: the right cause, at once, in one line; and what is kept."""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_helpers import are_freed, failure, remembers, they_work
from torch.distributed.device_mesh import init_device_mesh

from labkit import collectives
from labkit.ranks import RankError, Ranks


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as pool:
        yield pool


@pytest.fixture(autouse=True)
def remembering(ranks: Ranks) -> None:
    """Every test begins with ranks that remember something."""
    ranks.push(memory="kept")


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
