"""A check names the property that failed and its cause; whatever an answer does, the lesson goes on."""

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit import collectives
from labkit.learn import CheckFailed, check, exercises, progress, progress_file
from labkit.learn.check_report import render
from labkit.learn.checking import Report, examine
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, find_exercise
from labkit.learn.nonsense import expect_tensor
from labkit.learn.observations import Observation, Outcome
from labkit.learn.properties import Property, bytes_sent, equality, memory, messages
from labkit.learn.untouched import is_untouched
from labkit.record import MemorySample, RankRecord

Answer = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_PROGRESS", raising=False)
    monkeypatch.delenv("LABKIT_STRICT", raising=False)
    progress_file.forget_memory()


# An exercise on two and three ranks: pass a tensor to the right neighbour, return what came from the left.


def numbers(rank: int, world_size: int) -> tuple[torch.Tensor]:
    return (torch.arange(4.0) + 10 * rank,)


def pass_on(function: Answer, tensor: torch.Tensor) -> torch.Tensor:
    like = torch.empty(4)
    received: torch.Tensor = expect_tensor(function(tensor), like)
    return received


def neighbours() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


def passes_right(tensor: torch.Tensor) -> torch.Tensor:
    left, right = neighbours()
    sent = collectives.isend(tensor, right)
    received = torch.empty_like(tensor)
    collectives.recv(received, left)
    sent.wait()
    return received


def keeps_its_own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def sends_twice(tensor: torch.Tensor) -> torch.Tensor:
    passes_right(tensor)
    return passes_right(tensor)


def receives_into_its_input(tensor: torch.Tensor) -> torch.Tensor:
    tensor.copy_(passes_right(tensor))
    return tensor.clone()


def returns_a_list(tensor: torch.Tensor) -> list[float]:
    return passes_right(tensor).tolist()


def waits_first(tensor: torch.Tensor) -> torch.Tensor:
    left, right = neighbours()
    received = torch.empty_like(tensor)
    collectives.recv(received, left)
    collectives.isend(tensor, right).wait()
    return received


def one_rank_raises(tensor: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise ValueError("rank one gives up")
    return passes_right(tensor)


def one_rank_loops(tensor: torch.Tensor) -> torch.Tensor:
    while dist.get_rank() == 1:
        pass
    return passes_right(tensor)


RIGHT = Exercise(
    id="right",
    lesson="99",
    title="To the right",
    dots=1,
    minutes=5,
    answer="passes_right",
    hints=("think",),
    properties=(
        equality(
            lambda outcome: [numbers((rank - 1) % outcome.world_size, 0)[0] for rank in range(outcome.world_size)],
            statement="it is what the left neighbour has",
        ),
        bytes_sent(lambda outcome, rank: 16, statement="it sends one tensor"),
        messages(lambda outcome, rank: 1, statement="in one message"),
    ),
    trials=tuple(Trial(f"{n} ranks", n, numbers, pass_on, ("tensor",)) for n in (2, 3)),
    wrong_answers=(
        WrongAnswer("keeps its own", keeps_its_own, "equality", "this rank's own input"),
        WrongAnswer("sends twice", sends_twice, "bytes", "2 times what is needed"),
        WrongAnswer("receives into its input", receives_into_its_input, "inputs", "in place"),
    ),
)


ON_TWO = dataclasses.replace(RIGHT, trials=RIGHT.trials[:1])


def failure(report: Report) -> tuple[str, str]:
    """The first property that failed, with what was measured and the cause."""
    line = report.failed[0]
    return line.name, f"{line.finding.measured} {line.finding.cause}"


def test_an_answer_on_ranks_that_is_right_passes_every_property() -> None:
    report = examine(RIGHT, passes_right)
    assert report.passed, str(report)
    assert [line.name for line in report.lines] == ["runs", "type", "inputs", "equality", "bytes", "messages"]


@pytest.mark.parametrize("wrong", RIGHT.wrong_answers, ids=lambda wrong: wrong.name)
def test_a_wrong_answer_fails_the_property_it_should_and_the_cause_is_named(wrong: WrongAnswer) -> None:
    name, words = failure(examine(ON_TWO, wrong.function))
    assert name == wrong.fails
    assert wrong.cause in words


@pytest.mark.parametrize(
    ("answer", "property_name", "words"),
    [
        (returns_a_list, "type", "a list"),
        (waits_first, "runs", "nobody sends"),
        (one_rank_raises, "runs", "rank 1 raised ValueError: rank one gives up"),
        (one_rank_loops, "runs", "rank 1"),
    ],
)
def test_ranks_that_hang_raise_or_return_nonsense_are_named(answer: Answer, property_name: str, words: str) -> None:
    begun = time.perf_counter()
    name, found = failure(examine(ON_TWO, answer, seconds=2))
    assert name == property_name
    assert words in found
    assert time.perf_counter() - begun < 30, "it must end by itself"


# Single-process answers, to the exercise of lesson 00.


def fine(length: int, rank: int, world_size: int) -> range:
    return range(rank, length, world_size)


def fine_as_slice(length: int, rank: int, world_size: int) -> slice:
    return slice(rank, length, world_size)


def fine_as_tensor(length: int, rank: int, world_size: int) -> torch.Tensor:
    return torch.arange(length)[rank::world_size]


def loops(length: int, rank: int, world_size: int) -> None:
    while True:
        pass


def sleeps_in_c(length: int, rank: int, world_size: int) -> None:
    time.sleep(60)


def dies(length: int, rank: int, world_size: int) -> None:
    os._exit(3)


def crashes(length: int, rank: int, world_size: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def quits(length: int, rank: int, world_size: int) -> None:
    sys.exit("enough")


def recurses(length: int, rank: int, world_size: int) -> Any:
    return recurses(length, rank, world_size)


def divides_by_the_length(length: int, rank: int, world_size: int) -> range:
    return range(rank, length + 0 // length, world_size)


def never_ends(length: int, rank: int, world_size: int) -> Any:
    return itertools.count()


def is_a_text(length: int, rank: int, world_size: int) -> str:
    return "12"


def holds_halves(length: int, rank: int, world_size: int) -> list[float]:
    return [0.5]


def forgets_to_return(length: int, rank: int, world_size: int) -> None:
    range(rank, length, world_size)


def takes_too_few(length: int) -> range:
    return range(length)


def uses_what_torch_lacks(length: int, rank: int, world_size: int) -> Any:
    return torch.empty(1, device="meta").tolist()


@pytest.mark.parametrize("answer", [fine, fine_as_slice, fine_as_tensor])
def test_different_right_answers_pass(answer: Answer) -> None:
    report = examine(find_exercise("shares"), answer)
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("answer", "property_name", "words"),
    [
        (loops, "runs", "still busy after 1 s"),
        (sleeps_in_c, "runs", "still busy after 1 s"),
        (dies, "runs", "exit code 3"),
        (crashes, "runs", "SIGSEGV"),
        (quits, "runs", "SystemExit: enough"),
        (recurses, "runs", "calls itself without end"),
        (divides_by_the_length, "runs", "something is zero"),
        (takes_too_few, "runs", "positional argument"),
        (uses_what_torch_lacks, "runs", "NotImplementedError"),
        (is_a_text, "type", "a str, '12'"),
        (holds_halves, "type", "a float, 0.5"),
        (forgets_to_return, "type", "None (is there a return?)"),
        (never_ends, "coverage", "runs past the end"),
    ],
)
def test_whatever_an_answer_does_is_survived_and_named(answer: Answer, property_name: str, words: str) -> None:
    limit = 1.0 if answer in (loops, sleeps_in_c) else None
    name, found = failure(examine(find_exercise("shares"), answer, seconds=limit))
    assert (name, words in found) == (property_name, True), found


def test_an_answer_that_cannot_travel_to_a_rank_is_named() -> None:
    lock = threading.Lock()

    def locked(length: int, rank: int, world_size: int) -> range:
        with lock:
            return range(rank, length, world_size)

    name, found = failure(examine(find_exercise("shares"), locked))
    assert (name, "can't travel" in found) == ("runs", True)


def one_trial(name: str) -> Exercise:
    exercise = find_exercise(name)
    return dataclasses.replace(exercise, trials=exercise.trials[:1])


def floods(length: int, rank: int, world_size: int) -> range:
    print("x" * 3_000_000)
    os.write(1, b"y" * 3_000_000)
    return range(rank, length, world_size)


def test_megabytes_of_prints_are_cut_with_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    assert examine(one_trial("shares"), floods).passed
    shown = capfd.readouterr().out
    assert len(shown) < 10_000
    assert "more was printed" in shown
    assert shown.startswith("length 12, world size 1:\n[rank 0] xxx")


def test_a_few_prints_are_shown_whole(capfd: pytest.CaptureFixture[str]) -> None:

    def talks(length: int, rank: int, world_size: int) -> range:
        print("rank", rank, "of", world_size)
        return range(rank, length, world_size)

    examine(one_trial("shares"), talks)
    assert capfd.readouterr().out == "length 12, world size 1:\n[rank 0] rank 0 of 1\n"


# Stubs.


def stub(length: int, rank: int, world_size: int) -> range:
    """The indices of this rank."""
    raise NotImplementedError("not tried yet")  # your code here


def stub_of_dots(length: int, rank: int, world_size: int) -> range:  # type: ignore[empty-body]
    """The indices of this rank."""
    ...


def stub_after_given_lines(length: int, rank: int, world_size: int) -> range:
    size = length // world_size
    raise NotImplementedError(size)


@pytest.mark.parametrize("answer", [stub, stub_of_dots, stub_after_given_lines, lambda length, rank, size: None])
def test_an_untouched_stub_says_not_tried_yet(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    check("shares", answer)
    assert "not tried yet" in capsys.readouterr().out
    assert progress.exercise_entry("shares")["attempts"] == 0


def refuses(length: int, rank: int, world_size: int) -> range:
    raise ValueError("no")


@pytest.mark.parametrize("answer", [fine, refuses, forgets_to_return, loops, lambda length, rank, size: 3, print])
def test_an_attempt_is_not_taken_for_a_stub(answer: Answer) -> None:
    assert not is_untouched(answer)


# What the learner sees.


def test_a_check_shows_wanted_measured_and_cause_and_notes_the_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    check("shares", find_exercise("shares").wrong_answers[0].function)
    shown = capsys.readouterr().out
    assert "A fair share: 3 of 4 properties hold" in shown
    assert "✗ failed: every sample is in exactly one share" in shown
    assert "wanted each of the samples 0 to 11 exactly once, measured in no share: 10, 11" in shown
    assert "Likely cause: length // world_size drops the remainder" in shown
    entry = progress.exercise_entry("shares")
    assert (entry["attempts"], entry["passed"]) == (1, None)
    check("shares", fine)
    assert "all 4 properties hold" in capsys.readouterr().out
    entry = progress.exercise_entry("shares")
    assert entry["attempts"] == 2 and entry["passed"]


def test_the_table_escapes_what_an_answer_returned() -> None:
    def marks_up(length: int, rank: int, world_size: int) -> str:
        return "<script>alert(1)</script>"

    html = render(examine(find_exercise("shares"), marks_up))["text/html"]
    assert "&lt;script&gt;" in html and "<script>" not in html


def test_strict_raises_one_line_for_what_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_STRICT", "1")
    check("shares", fine)
    for answer, words in [(stub, "not tried yet"), (is_a_text, "type failed"), (None, "the function itself")]:
        with pytest.raises(CheckFailed, match=words) as failed:
            check("shares", answer)  # type: ignore[arg-type]
        assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("name", "answer", "sentence"),
    [
        ("sharez", fine, "Did you mean “shares”?"),
        ("shares", [1, 2], 'write check("shares", share), without calling it'),
    ],
)
def test_a_misuse_of_check_is_one_sentence(
    name: str, answer: Any, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(name, answer)
    assert sentence in capsys.readouterr().out


def test_a_judge_that_stumbles_does_not_end_the_lesson() -> None:
    def stumbles(outcome: Outcome) -> Any:
        raise KeyError("odd")

    odd = dataclasses.replace(ON_TWO, properties=(Property("odd", "it is judged", stumbles),))
    name, words = failure(examine(odd, passes_right))
    assert (name, "can't be compared" in words) == ("odd", True)


# Properties, on made-up observations.


def outcome_of(values: list[Any], record: RankRecord | None = None) -> Outcome:
    trial = Trial("made up", len(values), numbers)
    return Outcome(trial, tuple(Observation(rank, value, record or RankRecord()) for rank, value in enumerate(values)))


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (torch.full((4,), 6.0), "3 times too large on 3 ranks"),
        (torch.full((4,), 2 / 3), "3 times too small on 3 ranks"),
        (torch.tensor([2.0, 2.0, 2.0, float("nan")]), "not finite"),
        (torch.full((4, 1), 2.0), "a dim is lost or added"),
        (torch.arange(4.0), "this rank's own input"),
    ],
)
def test_known_slips_in_a_tensor_are_named(value: torch.Tensor, cause: str) -> None:
    judged = equality(lambda outcome: [torch.full((4,), 2.0)] * 3, statement="").judge(outcome_of([value] * 3))
    assert not judged.passed
    assert cause in judged.cause


def test_equality_has_the_tolerance_of_the_workbook() -> None:
    near = equality(lambda outcome: [torch.ones(4)], statement="")
    assert near.judge(outcome_of([torch.ones(4) + 1e-5])).passed
    assert not near.judge(outcome_of([torch.ones(4) + 2e-5])).passed


def test_memory_is_the_recorded_peak_of_one_kind() -> None:
    samples = [MemorySample(0.0, 0, "gradients", n) for n in (100, 400, 200)]
    seen = outcome_of([None], RankRecord(memory=[*samples, MemorySample(0.0, 0, "parameters", 999)]))
    assert memory("gradients", lambda outcome, rank: 400, statement="").judge(seen).passed
    assert memory("gradients", lambda outcome, rank: 390, statement="", within=0.05).judge(seen).passed
    judged = memory("gradients", lambda outcome, rank: 200, statement="").judge(seen)
    assert not judged.passed and "400 bytes of gradients" in judged.measured
    assert "nothing recorded" in memory("activations", lambda outcome, rank: 1, statement="").judge(seen).measured


def test_an_exercise_needs_three_wrong_answers_and_an_id_of_its_own() -> None:
    with pytest.raises(ValueError, match="three or more wrong answers"):
        dataclasses.replace(RIGHT, wrong_answers=RIGHT.wrong_answers[:2])
    find_exercise("shares")
    with pytest.raises(ValueError, match="registered twice"):
        exercises.register(dataclasses.replace(RIGHT, id="shares"))


def test_nothing_is_left_behind_by_an_answer_that_hung() -> None:
    import psutil

    def started() -> set[int]:
        found = set()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.add(child.pid)
        return found

    examine(find_exercise("shares"), fine)  # the fork server stays
    before = started()
    examine(find_exercise("shares"), loops, seconds=0.5)
    assert started() <= before


def test_a_process_passes_on_only_so_much_and_then_prints_as_before() -> None:
    code = """
import os, subprocess, sys
from labkit.learn.bounded_output import BoundedOutput
with BoundedOutput(100):
    print("p" * 60)
    os.write(2, b"w" * 10_000)
    subprocess.run([sys.executable, "-c", "print('c' * 100_000)"])
    sys.stdout.buffer.write(b"b" * 100)
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    bounded, _, after = done.stdout.partition("\n[more was printed, which is left out here]\n")
    assert (bounded[:60], len(bounded), after, done.stderr) == ("p" * 60, 100, "after\n", "")
