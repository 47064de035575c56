"""Lessons are found, their parameters are checked, and a run of one says all that it did."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_lessons import RESULT, write_lesson

from labkit.learn.commands import lessons_command, run_command
from labkit.learn.leftovers import marked_processes
from labkit.learn.lessons import LessonError, all_lessons, find_lesson
from labkit.learn.parameters import alternate_values, check_values, read_assignments
from labkit.learn.running import run_lesson

PICTURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"
# a child in a session of its own, whose parent ends with the kernel: nobody's child any more
ORPHAN = """import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(61.25)"], start_new_session=True)
"""


def test_lessons_are_the_numbered_notebooks_in_order(tmp_path: Path) -> None:
    for name in ("01-later", "00-first", "notes"):
        write_lesson(tmp_path, name=name, title=f"On {name}", needs=["00"])
    first, later = all_lessons(tmp_path)
    assert (first.name, first.number, first.title, first.needs) == ("00-first", "00", "On 00-first", ("00",))
    assert later.minutes == {"quick": 0.1, "lab": 5}


def test_a_lesson_is_found_by_number_name_and_path(tmp_path: Path) -> None:
    lesson = write_lesson(tmp_path, name="03-collectives")
    for asked in ("03", "03-collectives", "03-collectives.ipynb", str(lesson.path)):
        assert find_lesson(asked, tmp_path).path == lesson.path
    with pytest.raises(LessonError, match=r"There is no lesson '04'; there are: 03-collectives\."):
        find_lesson("04", tmp_path)


def test_parameters_carry_type_default_and_help(tmp_path: Path) -> None:
    parameters = write_lesson(tmp_path).parameters
    assert [(one.name, one.type, one.default, one.help) for one in parameters] == [
        ("profile", "str", "quick", "quick, lab or gpu"),
        ("world_size", "int", 2, "ranks"),
        ("rate", "float", 0.5, "learning rate"),
        ("fast", "bool", False, "whether to hurry"),
    ]


def test_text_becomes_a_value_of_the_parameters_type(tmp_path: Path) -> None:
    given = read_assignments(write_lesson(tmp_path), ["world_size=4", "rate=1e-3", "fast=True", "profile=lab"])
    assert given == {"world_size": 4, "rate": 0.001, "fast": True, "profile": "lab"}
    assert type(given["world_size"]) is int


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("wrld=4", "00-tiny has no parameter 'wrld'; it has: profile .str., world_size .int., rate .float., fast"),
        ("world_size=two", "The parameter world_size of 00-tiny takes int, as in world_size=2; 'two' is none"),
        ("world_size=2.0", "takes int"),
        ("rate=fast", "takes float"),
        ("fast=maybe", "takes bool"),
        ("world_size", "given as key=value"),
    ],
)
def test_an_unknown_or_ill_typed_parameter_is_refused_in_a_sentence(
    tmp_path: Path, assignment: str, sentence: str
) -> None:
    with pytest.raises(LessonError, match=sentence):
        read_assignments(write_lesson(tmp_path), [assignment])


def test_a_parameter_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LessonError, match="world_size is given twice"):
        read_assignments(write_lesson(tmp_path), ["world_size=2", "world_size=3"])


def test_values_from_python_are_checked_too(tmp_path: Path) -> None:
    lesson = write_lesson(tmp_path)
    assert check_values(lesson, {"rate": 1}) == {"rate": 1.0}
    for wrong in ({"world_size": "2"}, {"world_size": True}, {"fast": 1}, {"ranks": 2}):
        with pytest.raises(LessonError):
            check_values(lesson, wrong)


def test_alternate_parameters_come_from_the_lesson_else_other_ranks_and_seeds(tmp_path: Path) -> None:
    plain = write_lesson(tmp_path / "a")
    assert alternate_values(plain) == [{"world_size": 3}, {"world_size": 1}]
    own = write_lesson(tmp_path / "b", alternate=[{"rate": 0.1, "world_size": 4}])
    assert alternate_values(own) == [{"rate": 0.1, "world_size": 4}]
    assert alternate_values(write_lesson(tmp_path / "c", parameters="steps: int = 3")) == []


def test_a_run_collects_results_with_the_parameters_given(tmp_path: Path) -> None:
    lesson = write_lesson(tmp_path)
    run = run_lesson(lesson, {"world_size": 3}, tmp_path / "out")
    assert run.ok and not run.error and run.seconds > 0
    assert run.results == [
        {"name": "ranks-squared", "value": 9, "unit": "ranks²", "cell": "cell-0"},
        {"name": "scaled-rate", "value": 1.5, "unit": "1/step", "cell": "cell-0"},
    ]
    assert run.parameters == {"profile": "quick", "world_size": 3, "rate": 0.5, "fast": False}
    assert Path(run.notebook) == tmp_path / "out" / "00-tiny+world_size=3.ipynb" and Path(run.notebook).exists()
    assert "outputs" not in json.dumps(json.loads(lesson.path.read_text())["cells"][0])


def test_a_failing_cell_is_named_and_what_came_before_is_kept(tmp_path: Path) -> None:
    run = run_lesson(write_lesson(tmp_path, [RESULT, "1 / 0", RESULT]), {}, tmp_path / "out")
    assert (run.status, run.error) == ("failed", "cell cell-1: ZeroDivisionError: division by zero")
    assert len(run.results) == 2


def test_a_dead_kernel_and_an_endless_cell_are_errors_of_the_run(tmp_path: Path) -> None:
    dead = run_lesson(write_lesson(tmp_path, ["import os; os._exit(3)"]), {}, tmp_path / "out")
    assert (dead.status, dead.error) == ("failed", "the kernel died")
    endless = write_lesson(tmp_path, ["import time\nwhile True: time.sleep(0.1)"], name="01-endless")
    run = run_lesson(endless, {}, tmp_path / "out", cell_timeout=1)
    assert (run.status, run.error) == ("failed", "a cell ran longer than 1 s without coming to its end")


def test_a_process_left_behind_is_an_error_of_the_run_and_is_ended(tmp_path: Path) -> None:
    run = run_lesson(write_lesson(tmp_path, [ORPHAN]), {}, tmp_path / "out")
    assert run.status == "failed"
    assert run.error.startswith("processes were left behind: ") and "time.sleep(61.25)" in run.error
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in running if "import time; time.sleep(61.25)" in command]


def test_ending_the_runner_ends_the_lesson(tmp_path: Path) -> None:
    lesson = write_lesson(tmp_path, [f"open({str(tmp_path / 'begun')!r}, 'w').close()", "import time; time.sleep(60)"])
    mark = "test-ending-the-runner"
    code = f"""
import os, contextlib, labkit.learn.running as running
running.marked = lambda: contextlib.nullcontext({mark!r})
from labkit.learn.lessons import read_lesson
from pathlib import Path
running.run_lesson(read_lesson(Path({str(lesson.path)!r})), {{}}, Path({str(tmp_path / "out")!r}))
"""
    runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "LABKIT_RUN": mark})
    deadline = time.monotonic() + 30
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(marked_processes(mark)) >= 2
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not marked_processes(mark)


def test_the_run_command_leaves_notebooks_an_index_and_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_lesson(tmp_path, [PICTURE, RESULT], title="Good & <right>")
    bad = write_lesson(tmp_path, ["raise ValueError('no')"], name="01-bad")
    out = tmp_path / "out"
    assert run_command([str(good.path), str(bad.path), "-p", "world_size=3", "--out", str(out)]) == 1
    first, second, *_more, last = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["00-tiny+world_size=3", "ok"]
    assert second.split()[1] == "failed" and "cell cell-0: ValueError: no" in second
    assert last == "1 passed, 1 failed"
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["lesson"], row["world_size"], row["name"], row["value"]) for row in rows] == [
        ("00-tiny", "3", "ranks-squared", "9"),
        ("00-tiny", "3", "scaled-rate", "1.5"),
        ("01-bad", "3", "", ""),
    ]
    assert rows[2]["error"] == "cell cell-0: ValueError: no"
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["ok", "failed"]
    page = (out / "index.html").read_text()
    assert (
        "Good &amp; &lt;right&gt;" in page and "<right>" not in page and "ranks-squared" in page and "http" not in page
    )
    assert 'src="pictures/00-tiny%2Bworld_size%3D3.png"' in page
    assert (out / "pictures" / "00-tiny+world_size=3.png").read_bytes().startswith(b"\x89PNG")
    assert "<img" in (out / "notebooks" / "00-tiny+world_size=3.html").read_text()


def test_nothing_runs_when_one_lesson_would_refuse_a_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    takes = write_lesson(tmp_path)
    refuses = write_lesson(tmp_path, name="01-other", parameters="steps: int = 3  # steps")
    out = tmp_path / "out"
    assert run_command([str(takes.path), str(refuses.path), "-p", "world_size=3", "--out", str(out)]) == 2
    assert capsys.readouterr().err == "labkit: 01-other has no parameter 'world_size'; it has: steps (int).\n"
    assert not out.exists()


def test_the_lessons_command_lists_minutes_and_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson = write_lesson(tmp_path)
    monkeypatch.setattr("labkit.learn.commands.all_lessons", lambda: [lesson])
    assert lessons_command([]) == 0
    text = capsys.readouterr().out
    assert "00-tiny: A tiny lesson" in text and "minutes: quick 0.1, lab 5" in text
    assert "-p world_size=2  int  ranks" in text
    assert lessons_command(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["parameters"][1] == {
        "name": "world_size",
        "type": "int",
        "default": 2,
        "help": "ranks",
    }
