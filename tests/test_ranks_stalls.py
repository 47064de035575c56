"""Ranks that wait for what does not come: a notice first, an error at the timeout, both saying who waits where."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit import collectives
from labkit.ranks import RankError, Ranks
from labkit.ranks.phrases import FINISHED, those, told
from labkit.ranks.stalls import StallWatch
from labkit.ranks.whereabouts import Whereabouts

TIMEOUT = 0.5  # seconds


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, timeout=TIMEOUT) as pool:
        yield pool


def stall(ranks: Ranks, function: Callable[[], Any]) -> str:
    """The error of a stall, its places replaced by the lines counted from the function's first."""
    with pytest.raises(RankError) as caught:
        ranks.run(function)
    error = caught.value
    assert error.kind == "timeout"
    text, first = str(error), function.__code__.co_firstlineno
    for line in range(first, first + 20):
        text = text.replace(f"test_ranks_stalls.py, line {line}", f"line {line - first}")
    return text.removeprefix(f"no progress for {TIMEOUT:g} s: ")


def rest(ranks: Ranks, *, but: int = 0) -> str:
    return those([rank for rank in range(ranks.world_size) if rank > but], ranks.world_size)


# --- what the error says ---


@pytest.mark.parametrize("library", [dist, collectives], ids=["torch", "labkit"])
def test_a_collective_that_one_rank_calls_alone(ranks: Ranks, library: Any) -> None:
    def call(name: str = library.__name__) -> None:
        if dist.get_rank() == 0:
            __import__("sys").modules[name].all_reduce(torch.ones(2))

    peer = {dist: "", collectives: f" for rank {ranks.world_size - 1}"}[library]
    assert stall(ranks, call) == f"rank 0 waits{peer} in all_reduce, line 2; {rest(ranks)} finished"
    assert ranks.run(lambda: 1) == [1] * ranks.world_size


def test_a_receive_that_nobody_sends(ranks: Ranks) -> None:
    def wait() -> None:
        if dist.get_rank() == 0:
            collectives.recv(torch.zeros(2), 1)

    assert stall(ranks, wait) == f"rank 0 waits for rank 1 in recv, line 2; {rest(ranks)} finished"


def test_a_receive_by_torch_and_its_wait(ranks: Ranks) -> None:
    def wait() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(2), 1)
        elif dist.get_rank() == 1:
            work: Any = dist.irecv(torch.zeros(2), 0)
            work.wait()

    others = f"; {rest(ranks, but=1)} finished" if ranks.world_size > 2 else ""
    assert stall(ranks, wait) == f"rank 0 waits in recv, line 2; rank 1 waits in wait(), line 5{others}"


def test_different_collectives_at_the_same_time(ranks: Ranks) -> None:
    def disagree() -> None:
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            dist.recv(torch.zeros(1), 0)

    verb = "waits" if ranks.world_size == 2 else "wait"
    assert stall(ranks, disagree) == f"rank 0 waits in barrier, line 2; {rest(ranks)} {verb} in recv, line 4"


def test_a_wait_in_a_subgroup(ranks: Ranks) -> None:
    def wait() -> None:
        group: Any = dist.new_group([0, 1])
        if dist.get_rank() == 1:
            dist.barrier(group)

    text = stall(ranks, wait)
    assert "rank 1 waits in barrier, line 3" in text
    assert "rank 0 finished" in text or f"{those([0, 2, 3], 4)} finished" in text


def test_a_group_that_not_all_ranks_build(ranks: Ranks) -> None:
    def build() -> None:
        if dist.get_rank() == 0:
            dist.new_group([0, 1])

    assert stall(ranks, build) == f"rank 0 waits in new_group, line 2; {rest(ranks)} finished"


def test_a_backward_that_one_rank_runs_alone(ranks: Ranks) -> None:
    def train() -> None:
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        if dist.get_rank() == 0:
            module(torch.ones(1, 2)).sum().backward()

    assert stall(ranks, train) == f"rank 0 waits in backward, line 3; {rest(ranks)} finished"


def test_a_collective_in_the_background(ranks: Ranks) -> None:
    def wait() -> None:
        if dist.get_rank() == 0:
            work = collectives.all_reduce(torch.ones(2), async_op=True)
            assert work is not None
            work.wait()

    assert f"rank 0 waits for rank {ranks.world_size - 1} in all_reduce, line 4" in stall(ranks, wait)


def test_after_a_stall_the_ranks_remember_and_work(ranks: Ranks) -> None:
    ranks.push(memory="kept")
    with pytest.raises(RankError):
        ranks.run_cell("if rank == 0: dist.barrier()")
    assert ranks.pull("memory") == ["kept"] * ranks.world_size
    assert ranks.run_cell("dist.barrier()") == [None] * ranks.world_size


def test_a_cell_has_a_timeout_of_its_own_and_the_next_one_not() -> None:
    with Ranks(2, timeout=60) as two:
        two.push(memory="kept")
        for code in ("if rank == 0: dist.barrier()", "if rank == 0: dist.recv(torch.zeros(1), 1)"):
            with pytest.raises(RankError, match=r"^no progress for 0\.5 s: rank 0 waits in (barrier|recv), line 1"):
                two.run_cell(code, timeout=0.5)
        assert two.pull("memory") == ["kept", "kept"]
        assert two.run_cell("import time; time.sleep(0.9 * rank); dist.barrier(); 'waited'") == ["'waited'"] * 2


def test_a_cell_may_wait_longer_than_the_others() -> None:
    with Ranks(2, timeout=0.5) as two:
        code = "import time; time.sleep(1 * rank); dist.barrier(); 'waited'"
        assert two.run_cell(code, timeout=60) == ["'waited'"] * 2
        with pytest.raises(
            RankError, match=r"^no progress for 0\.5 s: rank 0 waits in barrier, line 1; rank 1 finished"
        ):
            two.run_cell("if rank == 0: dist.barrier()")


def test_a_wait_that_the_learners_code_gives_up_is_no_error(ranks: Ranks) -> None:
    def give_up() -> str:
        if dist.get_rank() == 0:
            try:
                dist.recv(torch.zeros(1), 1)
            except RuntimeError:
                return "gave up"
        return "did not wait"

    assert ranks.run(give_up) == ["gave up"] + ["did not wait"] * (ranks.world_size - 1)
    assert ranks.run_cell("dist.barrier()") == [None] * ranks.world_size


def test_a_collective_that_gloo_ends_at_the_timeout_leaves_a_group_that_the_next_error_rebuilds() -> None:
    def wait() -> str:
        if dist.get_rank() == 0:
            try:
                dist.barrier()
            except RuntimeError as error:
                return str(error)
        return ""

    with Ranks(2, timeout=0.5) as two:
        assert "Timed out waiting 500ms" in two.run(wait)[0]
        with pytest.raises(RankError, match="raised RuntimeError: the connection to another rank was lost"):
            two.run(dist.barrier)
        two.run(dist.barrier)


# --- the timeout bounds one wait, not a call ---


def test_a_call_may_take_longer_than_the_timeout_as_long_as_there_is_progress(ranks: Ranks) -> None:
    def work(seconds: float) -> int:
        end, rounds = time.monotonic() + seconds, torch.ones(1)
        while rounds.item() > 0:
            # one rank decides, so that all stop in the same round
            rounds[0] = float(time.monotonic() < end) if dist.get_rank() == 0 else 0.0
            dist.all_reduce(rounds)
            time.sleep(0.01)
        return 1

    assert ranks.run(work, 2 * TIMEOUT) == [1] * ranks.world_size


def test_ranks_that_sleep_or_compute_are_not_stalled(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(time.sleep, 2 * TIMEOUT)
    assert "progress" not in capsys.readouterr().out


# --- the notice ---


def test_the_notice_says_who_waits_where_and_when_the_error_follows(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError):
        ranks.run_cell("if rank == 0:\n    dist.barrier()", timeout=1.2)
    doings = f"rank 0 waits in barrier, line 2; {rest(ranks)} finished"
    notice = f"[ranks] no progress for 0.6 s: {doings} (an error follows at 1.2 s)"
    assert capsys.readouterr().out.splitlines() == [notice]


def test_ranks_that_take_no_part_are_named_so(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="rank 0 waits in barrier, line 1"):
        ranks.run_cell("dist.barrier()", on=[0], timeout=1.2)
    verb = "takes" if ranks.world_size == 2 else "take"
    assert f"rank 0 waits in barrier, line 1; {rest(ranks)} {verb} no part" in capsys.readouterr().out


def at(moment: float, operation: str = "barrier", **fields: Any) -> Whereabouts:
    return Whereabouts("busy", "line 2", "dist.barrier()", operation, moment=moment, **fields)


def test_the_notice_comes_once_after_five_seconds_and_again_if_something_changed() -> None:
    watch = StallWatch(60)
    others = {1: FINISHED, 2: FINISHED, 3: FINISHED}
    notices = [watch.look({0: at(second)}, others, 4) for second in range(8)]
    assert notices == [None] * 5 + [
        "no progress for 5 s: rank 0 waits in barrier, line 2; ranks 1-3 finished (an error follows at 60 s)",
        None,
        None,
    ]
    later = [watch.look({0: at(second, "all_reduce")}, others, 4) for second in range(8, 16)]
    assert sum(notice is not None for notice in later) == 1


def test_a_rank_that_others_wait_for_is_shown_as_busy() -> None:
    watch = StallWatch(60)
    busy = Whereabouts("busy", "line 5", "evaluate()")
    notice = [watch.look({0: busy, 1: at(second)}, {}, 2) for second in range(6)][-1]
    doings = "rank 0 is busy, line 5: evaluate(); rank 1 waits in barrier, line 2"
    assert notice == f"waiting for 5 s: {doings} (an error follows at 60 s)"


@pytest.mark.parametrize(
    "moving",
    [
        lambda second: at(second, progress=(second, 0)),
        lambda second: at(second, progress=(0, second)),
        lambda second: at(second, processor=0.5 * second),
    ],
    ids=["messages", "collectives", "processor"],
)
def test_ranks_that_get_on_are_not_told_of(moving: Callable[[int], Whereabouts]) -> None:
    watch = StallWatch(60)
    assert [watch.look({0: moving(second)}, {1: FINISHED}, 2) for second in range(100)] == [None] * 100
    assert not watch.expired


def test_a_wait_expires_at_the_timeout() -> None:
    watch = StallWatch(60)
    seen = []
    for second in range(63):
        watch.look({0: at(second)}, {1: FINISHED}, 2)
        seen.append(watch.expired)
    assert seen.index(True) == 61


def test_ranks_in_words() -> None:
    assert [those(ranks, 8) for ranks in ([3], [0, 1], [0, 2, 1], [0, 2, 3, 4], range(8))] == [
        "rank 3",
        "ranks 0 and 1",
        "ranks 0-2",
        "ranks 0 and 2-4",
        "all ranks",
    ]
    assert those([0], 1) == "rank 0"
    waits = ("waits in barrier", "wait in barrier")
    assert told({0: waits, 1: FINISHED, 2: waits}, 3) == "ranks 0 and 2 wait in barrier; rank 1 finished"
