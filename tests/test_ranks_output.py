"""What ranks write: labelled, whole, grouped where nobody watches and live where somebody does."""

import atexit
import io
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks_helpers import wait_until

from labkit.ranks import RankError, Ranks
from labkit.ranks.output import MOST, Output, is_live


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as pool:
        yield pool


def labelled(ranks: Ranks, *lines: str) -> list[str]:
    """These lines from every rank, rank after rank."""
    return [f"[rank {rank}] {line}" for rank in range(ranks.world_size) for line in lines]


def test_it_is_grouped_by_rank_whatever_the_order_it_came_in(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        for line in range(3):
            time.sleep(0.01 * (dist.get_world_size() - dist.get_rank()))
            print(f"line {line}")

    for _ in range(2):
        ranks.run(speak)
        assert capsys.readouterr().out.splitlines() == labelled(ranks, "line 0", "line 1", "line 2")


class Display(io.StringIO):
    """Shows text, and notes in a folder which turns it has shown."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def write(self, text: str) -> int:
        for turn in re.findall(r"turn (\d+)", text):
            (self.folder / turn).touch()
        return super().write(text)


def test_live_it_appears_at_once_and_in_the_order_in_which_it_is_written(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def take_turns() -> None:
        for turn in range(dist.get_rank(), 6, dist.get_world_size()):
            # a rank speaks only when it has seen the words of the one before on the display
            while turn and not (tmp_path / str(turn - 1)).exists():
                time.sleep(0.01)
            print(f"turn {turn}")

    monkeypatch.setenv("LABKIT_OUTPUT", "live")
    display = Display(tmp_path)
    monkeypatch.setattr(sys, "stdout", display)
    ranks.run(take_turns)
    assert display.getvalue().splitlines() == [f"[rank {turn % ranks.world_size}] turn {turn}" for turn in range(6)]


def test_everything_that_is_written_arrives_whoever_writes_it(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        print("by print")
        print("to stderr", file=sys.stderr)
        subprocess.run(["echo", "by a child"], check=True)
        warnings.warn("a warning", UserWarning, stacklevel=1)
        print("no newline", end="")

    ranks.run(write)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(ranks.world_size):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine[:3] == ["by print", "to stderr", "by a child"]
        assert mine[3].endswith("UserWarning: a warning")
        assert mine[-1] == "no newline"


def test_three_megabytes_arrive_whole(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        for line in range(3000):
            print(f"{line:05}" + "x" * 1000)

    ranks.run(write)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3000 * ranks.world_size
    assert [line[9:14] for line in lines] == [f"{line:05}" for line in range(3000)] * ranks.world_size
    assert {len(line) for line in lines} == {9 + 1005}


def test_three_megabytes_without_a_newline_arrive_whole(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(lambda: print("y" * 3_000_000, end=""))
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [9 + 3_000_000] * ranks.world_size


def test_what_is_written_before_an_error_is_shown(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        print("before the error")
        raise ValueError

    with pytest.raises(RankError):
        ranks.run(fail)
    assert capsys.readouterr().out.splitlines() == labelled(ranks, "before the error")


def test_what_is_written_before_a_death_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def die() -> None:
        print("last words", flush=True)
        __import__("os")._exit(1)

    with Ranks(1) as one, pytest.raises(RankError):
        one.run(die)
    assert capsys.readouterr().out == "[rank 0] last words\n"


def test_what_is_written_between_calls_appears_at_the_next_one_and_blocks_nothing(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    def go_on() -> None:
        def write() -> None:
            for line in range(5000):  # far more than a pipe holds
                print(f"in the background {line:040}")

        threading.Thread(target=write, name="writing").start()

    def is_done() -> bool:
        return not any(thread.name == "writing" for thread in threading.enumerate())

    ranks.run(go_on)
    wait_until(lambda: all(ranks.run(is_done)), "the ranks have written everything")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5000 * ranks.world_size
    assert all(line[8:].startswith(" in the background ") for line in lines)


def test_ranks_that_write_when_idle_can_end_by_themselves(tmp_path: Path) -> None:
    def go_on() -> None:
        def write() -> None:
            while True:
                print("for ever" * 100)

        threading.Thread(target=write, daemon=True).start()
        atexit.register((tmp_path / f"{dist.get_rank()} ended").touch)

    with Ranks(2) as two:
        two.run(go_on)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 ended", "1 ended"]


def test_of_a_rank_that_writes_faster_than_it_is_read_only_some_is_taken_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = iter([b"x" * 100_000] * 50)
    with Ranks(1) as one:
        one.start()
        assert one._team is not None
        monkeypatch.setattr("labkit.ranks.processes.os.read", lambda *_: next(pieces))
        taken = len(one._team.members[0].read_output())
        monkeypatch.undo()
    assert 1_000_000 < taken < 2_000_000


def test_an_endless_print_ends_with_the_timeout_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    def flood() -> None:
        if dist.get_rank() == 1:
            dist.barrier()
        while True:
            print("z" * 1000)

    with Ranks(2, timeout=0.5) as two, pytest.raises(RankError, match="rank 1 waits in barrier"):
        two.run(flood)
    assert len(capsys.readouterr().out) < 2 * MOST


# --- lines, without any rank ---


def printed(live: bool, *pieces: tuple[int, bytes]) -> None:
    output = Output(2, live=live)
    for rank, data in pieces:
        output.feed(rank, data)
    output.finish()


BAR = [(0, b"\r 10%"), (0, b"\r 55%"), (0, b"\r100%\n")]


def test_a_progress_bar_collapses_to_its_last_state(capsys: pytest.CaptureFixture[str]) -> None:
    printed(False, *BAR)
    assert capsys.readouterr().out == "[rank 0] 100%\n"


def test_a_progress_bar_is_one_line_that_is_redrawn_when_live(capsys: pytest.CaptureFixture[str]) -> None:
    printed(True, *BAR)
    written = capsys.readouterr().out
    assert written.count("\n") == 1
    # what a terminal shows in the end
    assert written.rstrip("\n").split("\r")[-1] == "[rank 0] 100%"
    assert "[rank 0]  55%" in written


def test_a_shorter_state_leaves_nothing_of_a_longer_one(capsys: pytest.CaptureFixture[str]) -> None:
    printed(True, (0, b"\rlong and longer"), (0, b"\rend"), (1, b"a line\n"))
    shown = ""
    for part in capsys.readouterr().out.split("\n")[0].split("\r"):
        shown = part + shown[len(part) :]
    assert shown.rstrip() == "[rank 1] a line"


def test_tqdm_collapses(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    def count() -> None:
        from tqdm import tqdm

        for _ in tqdm(range(100), desc="steps", mininterval=0):
            pass

    ranks.run(count)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == ranks.world_size
    assert all("steps: 100%" in line for line in lines)


def test_letters_cut_in_two_are_joined(capsys: pytest.CaptureFixture[str]) -> None:
    letters = "Ünïcödé ✓\n".encode()
    printed(True, *[(0, letters[i : i + 1]) for i in range(len(letters))])
    assert capsys.readouterr().out == "[rank 0] Ünïcödé ✓\n"


def test_more_than_can_be_shown_is_counted_instead(capsys: pytest.CaptureFixture[str]) -> None:
    printed(False, (0, b"w" * MOST), (0, b"w" * 2_500_000))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "[rank 0] (and 2.5 MB more, not shown)"
    assert len(lines[0]) == MOST + 9


@pytest.mark.parametrize(
    ("environment", "live"),
    [
        ({}, False),
        ({"LABKIT_OUTPUT": "live"}, True),
        ({"JPY_PARENT_PID": "1", "JPY_SESSION_NAME": "lesson.ipynb"}, True),
        ({"JPY_PARENT_PID": "1"}, False),
        ({"JPY_PARENT_PID": "1", "JPY_SESSION_NAME": "lesson.ipynb", "LABKIT_OUTPUT": "grouped"}, False),
    ],
    ids=["pytest", "wanted", "JupyterLab", "papermill", "unwanted"],
)
def test_somebody_watches_in_jupyterlab_and_where_it_is_said(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], live: bool
) -> None:
    for name in ("JPY_PARENT_PID", "JPY_SESSION_NAME", "LABKIT_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert is_live() is live
