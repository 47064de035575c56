"""Predictions: read kindly, kept, set beside the measurement, and never in the way of Run All."""

import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch

from labkit.learn import predict, predictions, progress, progress_file, reveal
from labkit.learn.answers import Unreadable, read_number, write_number
from labkit.learn.beside import beside, comparison
from labkit.learn.predictions import Question, keep
from labkit.learn.results import MIME


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))
    progress_file.forget_memory()
    progress.set_lesson("00")
    predictions._asked.clear()
    predictions._revealed.clear()


@pytest.mark.parametrize(
    ("typed", "number"),
    [
        ("1.5", 1.5),
        ("1,5", 1.5),
        ("3/2", 1.5),
        ("2e6", 2e6),
        ("2E6", 2e6),
        (" ~ 2 ", 2),
        ("-3", -3),
        ("10^6", 1e6),
        ("2x10^6", 2e6),
        ("2*(4-1)/4", 1.5),
        ("2·3", 6),
        ("1 000 000", 1e6),
        ("1_000", 1000),
        ("1,000,000", 1e6),
        ("1.000.000", 1e6),
        ("1,234.5", 1234.5),
        ("1.234,5", 1234.5),
        ("0,125", 0.125),
        ("007", 7),
        ("1.5 x tensor", 1.5),
        ("1.5 X Tensor", 1.5),
    ],
)
def test_a_number_is_read_as_people_write_it(typed: str, number: float) -> None:
    assert read_number(typed, "x tensor") == number


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "many",
        "1.5 MB",
        "2*",
        "nan",
        "inf",
        "1/0",
        "9**9**9**9",
        "1e999",
        "(" * 1000,
        "__import__('os')",
        "3j",
        "1;2",
        "9" * 400,
    ],
)
def test_nonsense_is_answered_and_not_read(typed: str) -> None:
    with pytest.raises(Unreadable) as refusal:
        read_number(typed, "bytes")
    assert "3/2" in str(refusal.value)
    assert len(str(refusal.value)) < 200


def test_a_comma_that_can_mean_two_things_is_asked_about() -> None:
    with pytest.raises(Unreadable, match=r"1\.000 or 1000"):
        read_number("1,000")


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.5, "1.5"), (1e6, "1\u202f000\u202f000"), (0.33333, "0.3333"), (1.2e-9, "1.2e-09"), (1e20, "1e+20")],
)
def test_numbers_are_written_for_a_reader(number: float, text: str) -> None:
    assert write_number(number) == text


def test_an_answer_is_kept_with_its_unit_and_nonsense_is_not() -> None:
    asked = Question("ring-bytes", "How many?", "x tensor")
    done, text = keep(asked, "lots")
    assert not done and "can't be read" in text
    assert progress.kept_prediction("ring-bytes") is None
    done, text = keep(asked, "3/2")
    assert done and "1.5 x tensor" in text
    entry = progress.kept_prediction("ring-bytes")
    assert entry is not None and (entry["value"], entry["unit"], entry["lesson"]) == (1.5, "x tensor", "00")


def test_where_nobody_sits_predict_is_one_line_and_reveal_does_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    predict("ring-bytes", "How many bytes does each rank send?", unit="x tensor")
    predict("which", "Which one?", choices=["A", "B"])
    asked = capsys.readouterr().out
    assert asked.splitlines() == [
        "**Predict.** How many bytes does each rank send? A number, in x tensor.",
        "**Predict.** Which one? One of: A; B.",
    ]
    reveal("ring-bytes", torch.tensor(1.5))
    shown = capsys.readouterr().out
    assert "measured: 1.5 x tensor" in shown
    assert "Predicting first would have been possible" in shown
    assert progress.kept_prediction("ring-bytes") is None


def test_the_kept_answer_is_shown_when_the_cell_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    keep(Question("ring-bytes", "How many?", "bytes"), "2e6")
    predict("ring-bytes", "How many?", unit="bytes")
    assert "Your prediction: **2\u202f000\u202f000 bytes**" in capsys.readouterr().out


def test_reveal_sets_the_two_side_by_side_with_the_error_as_a_factor(capsys: pytest.CaptureFixture[str]) -> None:
    predict("ring-bytes", "How many?", unit="x tensor")
    keep(Question("ring-bytes", "How many?", "x tensor"), "3")
    reveal("ring-bytes", 1.5)
    shown = capsys.readouterr().out
    assert "predicted: 3 x tensor\nmeasured: 1.5 x tensor\nFactor 2.00: the prediction is 2.00 times" in shown
    entry = progress.kept_prediction("ring-bytes")
    assert entry is not None and (entry["measured"], entry["factor"]) == (1.5, 2.0)


def test_a_measurement_without_its_question_is_still_shown(capsys: pytest.CaptureFixture[str]) -> None:
    reveal("never-asked", 3, unit="bytes")
    assert "measured: 3 bytes" in capsys.readouterr().out


def test_a_choice_is_set_beside_what_was_seen(capsys: pytest.CaptureFixture[str]) -> None:
    predict("which", "Which one?", choices=["yes", "no"])
    keep(predictions._asked["which"], "no")
    reveal("which", True)
    assert "predicted: no\nmeasured: yes\nThe two differ." in capsys.readouterr().out


def test_an_answer_to_a_question_of_another_kind_is_not_used() -> None:
    keep(Question("which", "How many?"), "3")
    predict("which", "Which one?", choices=["yes", "no"])
    assert predictions._fitting(predictions._asked["which"]) is None


@pytest.mark.parametrize(
    ("predicted", "measured", "words"),
    [
        (1.5, 1.5, "agree: factor 1.00"),
        (6.0, 1.5, "the prediction is 4.00 times the measurement"),
        (1.5, 6.0, "the measurement is 4.00 times the prediction"),
        (1.0, 1e6, "1\u202f000\u202f000 times"),
        (0.0, 2.0, "2 bytes apart"),
        (-1.0, 2.0, "3 bytes apart"),
        (0.0, 0.0, "agree"),
        ("A", "A", "agree"),
    ],
)
def test_the_error_is_told_without_a_verdict(predicted: Any, measured: Any, words: str) -> None:
    text = comparison(predicted, measured, "bytes")
    assert words in text
    assert not any(judgement in text.lower() for judgement in ("wrong", "right", "correct", "good", "bad"))


def test_the_longer_bar_fills_its_width_and_the_other_its_share() -> None:
    html = beside("How many?", 0.5, 2.0, "<b>")["text/html"]
    assert "width:25.0%" in html and "width:100.0%" in html
    assert "&lt;b&gt;" in html and "<b>" not in html


@pytest.mark.parametrize(
    ("key", "options", "sentence"),
    [
        ("Ring Bytes", {}, "is no key"),
        ("x", {"choices": ["one"]}, "two or more"),
        ("x", {"choices": "ab"}, "two or more"),
        ("x", {"choices": ["a", "a"]}, "two or more"),
    ],
)
def test_a_malformed_question_is_refused(key: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        predict(key, "?", **options)


def _execute(cells: list[str], environment: dict[str, str]) -> list[list[dict[str, Any]]]:
    """The outputs of each cell, run in a kernel of its own."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=60)
    client.execute(env={**os.environ, **environment})
    return [cell.outputs for cell in notebook.cells]


def test_in_jupyterlab_a_late_answer_joins_the_measurement_that_stands_there() -> None:
    cells = [
        "from labkit.learn import predict, predictions, reveal",
        'predict("ring-bytes", "How many?", unit="bytes")',
        'reveal("ring-bytes", 1.5)',
        'print(predictions.keep(predictions._asked["ring-bytes"], "3"))',
    ]
    _, asked, revealed, answered = _execute(cells, {"LABKIT_LIVE": "1", "JUPYTER_PLATFORM_DIRS": "1"})
    assert "application/vnd.jupyter.widget-view+json" in asked[1]["data"]
    assert "the prediction is 2.00 times the measurement" in revealed[0]["data"]["text/plain"]
    assert "given after the measurement was shown" in revealed[0]["data"]["text/html"]
    assert "stands beside the measurement" in answered[0]["text"]
    entry = progress.kept_prediction("ring-bytes")
    assert entry is not None and entry["after_measurement"] is True


def test_in_a_batch_run_everything_is_plain_output_even_inside_of_jupyterlab() -> None:
    cells = [
        'from labkit.learn import *; say("**{x}** tensors", x=1.5)',
        'result("ring-bytes", 1.5, "x tensor")',
        'predict("ring-bytes", "How many?", unit="bytes")',
        'reveal("ring-bytes", 1.5)',
        'hint("shares"); solution("shares")',
    ]
    said, result, asked, revealed, helped = _execute(cells, {"JPY_SESSION_NAME": "/00-start-here.ipynb"})
    assert said[0]["data"] == {"text/markdown": "**1.5** tensors", "text/plain": "**1.5** tensors"}
    assert result[0]["data"][MIME] == {"name": "ring-bytes", "value": 1.5, "unit": "x tensor"}
    assert result[0]["data"]["text/plain"] == "ring-bytes = 1.5 x tensor"
    assert asked[0]["data"]["text/markdown"] == "**Predict.** How many? A number, in bytes."
    assert "No prediction was made" in revealed[0]["data"]["text/html"]
    assert helped[0]["data"]["text/markdown"].startswith("**Hint 1 of 3.**")
    assert "on request" in helped[1]["data"]["text/markdown"]
