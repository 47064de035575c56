"""Whatever is killed, and whenever: no process is left, and no temporary file."""

import os
import pty
import random
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest
from ranks_helpers import GUARD, Scene, scene, wait_until

# argument: what the ranks do, once they are there
SCRIPT = """
    import os, subprocess, sys, time
    import torch.distributed as dist
    from labkit.ranks import Ranks

    def child():
        # a child in a session of its own, one in the rank's, and one whose parent has ended
        for session in (True, False):
            subprocess.Popen(["sleep", "300"], start_new_session=session)
        subprocess.run(["sh", "-c", "sleep 300 &"])

    def lock():
        import ctypes
        ctypes.PyDLL(None).sleep(300)  # holds Python's lock

    def wait():
        if dist.get_rank() == 0:
            dist.barrier()

    print("begun", flush=True)
    ranks = Ranks(2)
    ranks.run(child)
    print("started", flush=True)
    ranks.run({"busy": time.sleep, "lock": lock, "wait": wait}[sys.argv[1]], *[300] * (sys.argv[1] == "busy"))
"""


@pytest.fixture
def stage() -> Iterator[Scene]:
    with scene() as one:
        yield one


def read_until(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    while (read := process.stdout.readline()) != line + "\n":
        assert read, f"it ended before it wrote {line!r}"


def test_when_a_script_is_killed_nothing_is_left(stage: Scene) -> None:
    ends = {
        "busy": lambda pid: os.kill(pid, signal.SIGTERM),
        "wait": lambda pid: os.killpg(pid, signal.SIGKILL),  # as Jupyter kills a kernel
        "lock": lambda pid: os.killpg(pid, signal.SIGKILL),
    }
    scripts = {state: stage.script(SCRIPT, state) for state in ends}
    for state, script in scripts.items():
        read_until(script, "started")
        time.sleep(0.2)
        ends[state](script.pid)
    for script in scripts.values():
        script.wait(GUARD)
    stage.wait_until_empty()


def test_when_a_script_is_killed_while_its_ranks_start_nothing_is_left(stage: Scene) -> None:
    scripts = [stage.script(SCRIPT, "busy") for _ in range(3)]
    draw = random.Random(7)
    for script in scripts:
        read_until(script, "begun")
    for script in scripts:
        # from before there is a fork server until the first call
        time.sleep(draw.uniform(0, 1))
        os.killpg(script.pid, signal.SIGKILL)
        script.wait(GUARD)
    stage.wait_until_empty()


def test_when_the_terminal_is_closed_nothing_is_left(stage: Scene) -> None:
    ours, theirs = pty.openpty()
    # in its own session, whose terminal is the one that it opens first
    shell = ["sh", "-c", f'exec < {os.ttyname(theirs)} && exec "$@"', "sh"]
    script = stage.script(SCRIPT, "wait", command=shell)
    read_until(script, "started")
    os.close(theirs)
    os.close(ours)
    assert script.wait(GUARD) == -signal.SIGHUP
    stage.wait_until_empty()


def test_a_script_without_a_guard_whose_ranks_are_killed_at_any_moment_goes_on(stage: Scene) -> None:
    written = stage.run_script(
        """
        print("this script runs once")
        import random, threading, time
        import psutil, torch, torch.distributed as dist
        from labkit.ranks import RankError, Ranks, forking, launch

        def work(seconds):
            end = time.monotonic() + seconds
            go_on = torch.ones(1)
            while go_on.item():
                go_on[0] = float(time.monotonic() < end)
                dist.all_reduce(go_on, op=dist.ReduceOp.MIN)

        def kill_one():
            # also while they start
            if running := psutil.Process(forking._server._forkserver_pid).children():
                draw.choice(running).kill()

        class Thing:
            pass

        forking.METHOD = "spawn"  # as where nothing can be forked
        assert launch(dist.get_world_size, 1) == [1]
        forking.METHOD = "forkserver"

        draw, ranks, deaths = random.Random(3), Ranks(2), 0
        ranks.start()
        for _ in range(12):
            timer = threading.Timer(draw.uniform(0, 0.25), kill_one)
            timer.start()
            try:
                ranks.run(work, 0.2)
            except RankError as error:
                assert error.kind in ("death", "start"), error
                deaths += 1
            timer.join()
        while True:
            try:
                assert ranks.run(dist.get_rank) == [0, 1]
                break
            except RankError as error:
                assert error.kind in ("death", "start"), error
        assert [type(thing) for thing in ranks.run(Thing)] == [Thing] * 2
        print(deaths)
        """
    )
    first, deaths = written.splitlines()
    assert first == "this script runs once"
    assert int(deaths) > 3
    stage.wait_until_empty()


def test_forked_children_of_the_caller_have_no_part_in_its_ranks(stage: Scene) -> None:
    script = stage.script(
        """
        import gc, os, sys, time
        from labkit.ranks import Ranks

        ranks = Ranks(2)
        pids = ranks.run(os.getpid)
        if (child := os.fork()) == 0:
            assert "not started" in repr(ranks)
            del ranks
            gc.collect()
            sys.exit()
        assert os.waitpid(child, 0) == (child, 0)
        assert ranks.run(os.getpid) == pids
        if os.fork() == 0:
            time.sleep(300)
        print("started", flush=True)
        print(*pids, flush=True)
        time.sleep(300)
        """
    )
    read_until(script, "started")
    assert script.stdout is not None
    ranks = [int(pid) for pid in script.stdout.readline().split()]
    script.kill()
    script.wait(GUARD)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "a child that lives on keeps no rank alive")
    for process in stage.processes():
        process.kill()
    stage.wait_until_empty()
