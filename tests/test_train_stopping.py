"""Ctrl-C and SIGTERM end a run after its running step, with a snapshot: in one process, on ranks, under torchrun."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from labkit.ranks import Ranks
from labkit.train import TrainConfig, train
from labkit.train.commands import train_command
from labkit.train.snapshots import latest_snapshot
from labkit.train.stopping import StopRequest, listening

LONG = TrainConfig(
    workload="text", d_model=8, num_heads=2, num_layers=1, max_len=8, limit=50, test_limit=9, batch_size=8,
    steps=1_000_000, learning_rate=0.01, progress="none",
)  # fmt: skip


def as_arguments(config):
    default = TrainConfig()
    return [f"{name}={value}" for name, value in config.as_dict().items() if value != getattr(default, name)]


def wait_for_steps(folder, count=3):
    """Return when the run in `folder` has written so many steps."""
    file, seen = folder / "metrics.jsonl", 0
    while seen < count:
        time.sleep(0.02)
        # lines come in blocks, when the file's buffer is full
        seen = file.read_bytes().count(b"\n") if file.exists() else 0


def signal_after_some_steps(folder, number):
    """Send this process a signal once the run in `folder` is under way."""

    def send():
        wait_for_steps(folder)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_signal_ends_the_run_with_a_snapshot_from_which_it_goes_on(tmp_path, dp, number):
    config = dataclasses.replace(LONG, dp=dp, folder=str(tmp_path))
    thread = signal_after_some_steps(tmp_path, number)
    result = train(config)
    thread.join()
    assert result.stopped == signal.Signals(number).name
    assert 3 <= result.step == len(result.losses) < config.steps
    assert latest_snapshot(tmp_path / "snapshots").step == result.step
    more = result.step + 3
    rest = train(dataclasses.replace(config, resume=True, steps=more))
    whole = train(dataclasses.replace(config, folder="", steps=more))
    assert whole.losses[-3:] == rest.losses


def test_the_command_tells_which_signal_stopped_it(tmp_path, capsys):
    thread = signal_after_some_steps(tmp_path, signal.SIGTERM)
    assert train_command([*as_arguments(LONG), f"folder={tmp_path}"]) == 143
    thread.join()
    assert "stopped by SIGTERM" in capsys.readouterr().out


def test_the_handlers_of_before_are_back_after_a_run():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(dataclasses.replace(LONG, steps=1))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_signal_stops_at_once():
    request = StopRequest()
    with pytest.raises(KeyboardInterrupt), listening(request, signal.SIGINT, say=False):
        signal.raise_signal(signal.SIGINT)
        assert request.asked and request.signal_name == "SIGINT"
        signal.raise_signal(signal.SIGINT)


def test_a_second_signal_ends_the_ranks_at_once(tmp_path, monkeypatch):
    # ranks that hear nothing of the first one
    monkeypatch.setattr(StopRequest, "ask", lambda self, name: setattr(self, "signal_name", name))

    def send_two():
        wait_for_steps(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send_two, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        train(dataclasses.replace(LONG, dp=2, folder=str(tmp_path)))
    written = (tmp_path / "metrics.jsonl").read_bytes()
    time.sleep(0.3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == written


def test_ranks_hear_of_it_by_a_file(tmp_path):
    there, here = StopRequest(tmp_path / "stop"), StopRequest(tmp_path / "stop")
    assert not there.asked
    here.ask("SIGINT")
    assert there.asked and there.signal_name == "SIGINT"


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "-m", "labkit.train", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_under_torchrun_dp_is_the_number_of_processes_and_the_losses_are_those_of_two_ranks(tmp_path):
    config = dataclasses.replace(LONG, steps=5)
    job = torchrun(*as_arguments(config), f"folder={tmp_path}")
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert out.count("5 steps, 2 ranks") == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    with Ranks(2) as ranks:
        same = ranks.run(train, config)[0]
    assert [line["loss"] for line in lines if line["kind"] == "train"] == pytest.approx(same.losses, abs=1e-6)
    snapshot = latest_snapshot(tmp_path / "snapshots")
    assert snapshot.world_size == 2
    torch.testing.assert_close(snapshot.read("model.head.linear.bias"), same.state_dict["head.linear.bias"])


def test_a_sigterm_to_torchrun_leaves_a_snapshot(tmp_path):
    job = torchrun(*as_arguments(LONG), f"folder={tmp_path}")
    wait_for_steps(tmp_path)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=300)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert latest_snapshot(tmp_path / "snapshots").step == steps[-1] > 3


def test_under_torchrun_a_wrong_number_of_ranks_is_refused_once():
    job = torchrun("dp=3", "batch_size=6")
    _, err = job.communicate(timeout=300)
    assert job.returncode != 0
    assert err.count("labkit train: dp=3 x pp=1 x tp=1 makes 3 ranks, but 2 were started") == 1
