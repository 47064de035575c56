"""Ranks in a real notebook kernel, as a learner meets them."""

import re
from collections.abc import Iterator

import psutil
import pytest
from ranks_helpers import Kernel, Scene, kernel, scene, wait_until


@pytest.fixture(scope="module")
def stage() -> Iterator[Scene]:
    with scene() as one:
        yield one


@pytest.fixture(scope="module")
def notebook(stage: Scene) -> Iterator[Kernel]:
    """A kernel of JupyterLab, where somebody watches."""
    with kernel(stage, JPY_SESSION_NAME="lesson.ipynb") as one:
        yield one
    # it was shut down while it had ranks
    stage.wait_until_empty()


@pytest.fixture(autouse=True)
def two_ranks(notebook: Kernel) -> None:
    """Every test begins with two ranks that remember something, and have no new ones to announce."""
    notebook.ok("old = globals().get('ranks')")
    notebook.ok("ranks = old if isinstance(old, Ranks) and (old.world_size, old.timeout) == (2, 60) else Ranks(2)")
    notebook.ok("ranks.push(memory='kept')")


def remembers(notebook: Kernel) -> bool:
    return not notebook.run("assert ranks.pull('memory') == ['kept', 'kept']").error


# --- the magic ---


def test_a_cell_runs_on_every_rank_names_persist_and_the_last_value_is_shown(notebook: Kernel) -> None:
    assert notebook.ok("%%ranks\nx = rank + 1\ntotal = torch.tensor([x, 0])") == ""
    assert notebook.ok("%%ranks\ndist.all_reduce(total)\ntotal.view(2, 1)").splitlines() == [
        "[rank 0] tensor([[3],",
        "[rank 0]         [0]])",
        "[rank 1] tensor([[3],",
        "[rank 1]         [0]])",
    ]
    assert notebook.ok("ranks.pull('x')") == "[1, 2]\n"


def test_the_first_cell_makes_two_ranks_under_the_name_ranks(notebook: Kernel) -> None:
    notebook.ok("ranks.close(); del ranks")
    assert notebook.ok("%%ranks\nworld_size").splitlines() == ["[rank 0] 2", "[rank 1] 2"]
    assert notebook.ok("ranks") == "Ranks(2, backend='gloo'): running\n"


def test_another_number_makes_new_ranks_with_the_settings_of_the_old(notebook: Kernel) -> None:
    notebook.ok("ranks = Ranks(2, timeout=33, threads=2)")
    assert notebook.ok("%%ranks -n 3 --on 0,2\nrank, torch.get_num_threads()").splitlines() == [
        "[ranks] 3 new ranks; the names of the old ones are gone",
        "[rank 0] (0, 2)",
        "[rank 2] (2, 2)",
    ]
    assert notebook.ok("ranks.timeout, ranks.world_size") == "(33, 3)\n"


def test_a_timeout_holds_for_its_cell_alone(notebook: Kernel) -> None:
    cell = notebook.run("%%ranks --timeout 0.5\nif rank == 0:\n    dist.barrier()")
    # lines are counted as the notebook numbers them, the magic's own included
    assert cell.message == "no progress for 0.5 s: rank 0 waits in barrier, line 3; rank 1 finished"
    assert remembers(notebook)
    assert notebook.ok("ranks.timeout") == "60\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("-n 0", "world_size is 0; give a whole number of ranks from 1 to 64"),
        ("-n two", "argument -n: invalid int value: 'two'; write %%ranks [-n RANKS] [--on 0,2] [--timeout SECONDS]"),
        ("--on 0,7", "there is no such choice of ranks: '0,7'; there are ranks 0 to 1"),
        ("--on a", "argument --on: 'a' is no list of ranks such as 0,2; write %%ranks [-n RANKS]"),
        ("--timeout 0", "timeout is 0.0; give seconds above 0"),
        ("--fast", "unrecognized arguments: --fast; write %%ranks [-n RANKS]"),
        ("-n 2 '", "No closing quotation"),
    ],
)
def test_bad_options_end_in_one_sentence_without_a_traceback(notebook: Kernel, options: str, told: str) -> None:
    cell = notebook.run(f"%%ranks {options}\n1")
    assert cell.message.startswith(f"%%ranks: {told}")
    assert len(cell.traceback.splitlines()) == 1
    assert remembers(notebook)


def test_a_variable_of_the_learners_under_the_name_ranks_is_not_overwritten(notebook: Kernel) -> None:
    notebook.ok("mine, ranks = ranks, [0, 1]")
    assert notebook.run("%%ranks\n1").message == (
        "%%ranks: it keeps its ranks under the name 'ranks', and yours is a list: rename yours"
    )
    assert notebook.ok("ranks") == "[0, 1]\n"
    notebook.ok("ranks = mine")


def test_a_name_that_only_the_notebook_has_is_explained(notebook: Kernel) -> None:
    notebook.ok("learning_rate = 0.1")
    cell = notebook.run("%%ranks\nlearning_rate")
    hint = "your notebook has 'learning_rate', the ranks do not: ranks.push(learning_rate=learning_rate) sends it"
    assert cell.message == f"all ranks raised NameError: name 'learning_rate' is not defined (line 2); {hint}"
    assert "your notebook" not in notebook.run("%%ranks\nnowhere").message


# --- errors as they are shown ---


def test_an_error_shows_the_learners_own_lines(notebook: Kernel) -> None:
    notebook.ok("def halve(number):\n    # a comment\n    return number / 0\n\ndef work():\n    return halve(1)")
    cell = notebook.run("ranks.run(work)")
    assert (cell.error, cell.message) == (
        "RankError",
        "all ranks raised ZeroDivisionError: division by zero (line 3)",
    )
    lines = cell.traceback.splitlines()
    assert lines[:3] == [f"RankError: {cell.message}", "", "on all ranks:"]
    assert "    return number / 0" in lines
    assert "    return halve(1)" in lines
    assert "labkit" not in cell.traceback


def test_an_error_in_a_cell_shows_its_line_and_what_the_others_did(notebook: Kernel) -> None:
    cell = notebook.run("%%ranks\nif rank == 1:\n    raise ValueError('here')\ndist.barrier()")
    assert cell.message == "rank 1 raised ValueError: here (line 3)"
    lines = cell.traceback.splitlines()
    assert "    raise ValueError('here')" in lines
    assert lines[-1] == "rank 0 was waiting in barrier, line 4"


def test_a_function_defined_after_ranks_were_restarted_shows_its_lines_too(notebook: Kernel) -> None:
    notebook.ok("def later():\n    raise KeyError('later')")
    notebook.ok("ranks.restart()")
    assert "    raise KeyError('later')" in notebook.run("ranks.run(later)").traceback


# --- there and back ---


def test_a_dataclass_of_the_notebook_survives(notebook: Kernel) -> None:
    notebook.ok(
        """
        from dataclasses import dataclass

        @dataclass
        class Loss:
            value: float

        def measure(scale):
            assert isinstance(scale, Loss)
            return Loss(scale.value * (dist.get_rank() + 1))

        assert ranks.run(measure, Loss(2.0)) == [Loss(2.0), Loss(4.0)]
        ranks.restart()
        assert ranks.run(measure, Loss(2.0)) == [Loss(2.0), Loss(4.0)]
        """
    )


def test_ranks_work_in_the_callback_of_a_widget(notebook: Kernel) -> None:
    written = notebook.ok(
        """
        import ipywidgets
        button, results = ipywidgets.Button(), []
        button.on_click(lambda _: results.append(ranks.run(dist.get_rank)))
        print(button.comm.comm_id)
        """
    )
    content = {"comm_id": written.strip(), "data": {"method": "custom", "content": {"event": "click"}}}
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", content))
    wait_until(lambda: notebook.ok("results") == "[[0, 1]]\n", "the callback has run")


def test_the_object_is_shown_as_a_table(notebook: Kernel) -> None:
    shown = notebook.ok("print(ranks._repr_html_())")
    assert re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", shown) == [("rank 0", "idle"), ("rank 1", "idle")]


# --- live ---


def test_output_appears_while_the_cell_runs(notebook: Kernel) -> None:
    seen: list[str] = []

    def look() -> None:
        seen.append("in time")

    # the rank goes on only when the test has seen its first words
    cell = notebook.run(
        """
        def speak():
            print("first", flush=True)
            import time
            time.sleep(1)
            print("second")

        ranks.run(speak)
        """,
        when="[rank 0] first",
        then=look,
    )
    assert seen == ["in time"]
    assert sum("first" in piece for piece in cell.pieces) >= 1
    assert not any("first" in piece and "second" in piece for piece in cell.pieces)


# --- the stop button ---


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("print('here', flush=True)\nimport time\ntime.sleep(60)", True),
        ("print('here', flush=True)\nwhile True: pass", True),
        ("print('here', flush=True)\nif rank == 0: dist.barrier()\nelse: dist.recv(torch.zeros(1), 0)", True),
        ("print('here', flush=True)\nimport ctypes\nctypes.PyDLL(None).sleep(60)", False),
    ],
    ids=["sleeping", "computing", "communicating", "holding the lock"],
)
def test_the_stop_button_reaches_the_cell_and_the_ranks(notebook: Kernel, code: str, kept: bool) -> None:
    cell = notebook.run(f"%%ranks\n{code}", when="here", then=notebook.interrupt)
    assert cell.error == "KeyboardInterrupt"
    assert ("what the ranks held is lost" in cell.text) is not kept
    assert remembers(notebook) is kept
    assert notebook.ok("%%ranks\ndist.barrier()\nrank").splitlines() == ["[rank 0] 0", "[rank 1] 1"]


def test_the_stop_button_pressed_twice_stops_at_once_what_would_not_stop(notebook: Kernel) -> None:
    def twice() -> None:
        notebook.interrupt()
        notebook.interrupt()

    stubborn = """
        %%ranks
        while True:
            try:
                print('here', flush=True)
                while True: pass
            except KeyboardInterrupt:
                pass
        """
    cell = notebook.run(stubborn, when="here", then=twice)
    assert cell.error == "KeyboardInterrupt"
    assert not remembers(notebook)


def test_the_stop_button_while_ranks_start_leaves_none(notebook: Kernel) -> None:
    notebook.ok("ranks.close()")
    cell = notebook.run("print('starting', flush=True)\nranks.start()", when="starting", then=notebook.interrupt)
    assert cell.error in ("KeyboardInterrupt", "")  # "" where they were there already
    assert notebook.ok("%%ranks\nrank").splitlines() == ["[rank 0] 0", "[rank 1] 1"]


# --- several kernels ---


def test_two_kernels_at_once_and_one_killed_during_a_call(notebook: Kernel, stage: Scene) -> None:
    with kernel(stage) as other:
        # nobody watches this one: what is written is grouped
        assert other.ok("%%ranks\nfor line in range(2):\n    dist.barrier()\n    print(line)").splitlines() == [
            "[rank 0] 0",
            "[rank 0] 1",
            "[rank 1] 0",
            "[rank 1] 1",
        ]
        ranks = [psutil.Process(int(pid)) for pid in re.findall(r"\d+", other.ok("import os\nranks.run(os.getpid)"))]
        assert notebook.ok("ranks.run(dist.get_rank)") == "[0, 1]\n"
        other.client.execute("%%ranks\nif rank == 0: dist.barrier()")
        other.kill()
        wait_until(lambda: not any(rank.is_running() for rank in ranks), "the killed kernel's ranks have ended")
    assert notebook.ok("ranks.run(dist.get_rank)") == "[0, 1]\n"
