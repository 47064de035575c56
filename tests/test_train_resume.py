"""A run that was ended, in whatever way, goes on to the same bits as one that never was."""

import dataclasses
import os
import random
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from labkit.ranks import RankError, Ranks
from labkit.train import ConfigError, TrainConfig, train
from labkit.train.snapshots import latest_snapshot

SETTINGS = dict(  # noqa: C408  # as TrainConfig is called
    workload="text", d_model=8, num_heads=2, num_layers=1, max_len=8, dropout=0.1, batch_size=8,
    steps=60, learning_rate=0.01, schedule="cosine", warmup=5, clip=0.5, progress="none",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A short run on a set of the user's own: 50 and 9 texts of two classes."""
    folder = tmp_path_factory.mktemp("set")
    for split, count in (("train", 50), ("test", 9)):
        rows = [f'"{i % 2 + 1}","{"good" if i % 2 else "bad"} number {i * i}"\n' for i in range(count)]
        (folder / f"{split}.csv").write_text("".join(rows))
    return TrainConfig(**SETTINGS, data=str(folder))


def in_folder(config, folder, **changes):
    return dataclasses.replace(config, folder=str(folder), **changes)


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def half_and_rest(run, config, folder, half):
    """A run ended after `half` steps, and its other half, begun anew from the snapshot."""
    first = run(in_folder(config, folder, steps=half))
    rest = run(in_folder(config, folder, resume=True))
    assert (first.step, rest.first_step, rest.step) == (half, half, config.steps)
    return first, rest


@pytest.mark.parametrize("half", [5, 7, 30])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resuming_gives_the_same_losses_to_the_last_bit(tiny, tmp_path, optimizer, half):
    # 50 samples in batches of 8: step 7 ends an epoch; the learning rate depends on the length, so it is constant
    config = dataclasses.replace(tiny, optimizer=optimizer, schedule="constant")
    whole = train(config)
    first, rest = half_and_rest(train, config, tmp_path, half)
    assert first.losses + rest.losses == whole.losses
    assert same_bits(rest.state_dict, whole.state_dict)


def test_resuming_on_two_ranks_gives_the_same_losses_to_the_last_bit(tiny, two, tmp_path):
    config = dataclasses.replace(tiny, schedule="constant")
    whole = two.run(train, config)[0]
    first, rest = half_and_rest(lambda one: two.run(train, one)[0], config, tmp_path, 33)
    assert first.losses + rest.losses == whole.losses
    assert same_bits(rest.state_dict, whole.state_dict)


def test_a_run_of_two_ranks_goes_on_in_one_process(tiny, two, tmp_path):
    config = dataclasses.replace(tiny, precision="float64", dropout=0.0, schedule="constant")
    whole = train(config)
    first = two.run(train, in_folder(config, tmp_path, steps=20))[0]
    rest = train(in_folder(config, tmp_path, resume=True))
    assert first.losses + rest.losses == pytest.approx(whole.losses, abs=1e-9)


def test_batch_norm_and_augmentation_resume_to_the_last_bit(two, tmp_path):
    config = TrainConfig(limit=40, test_limit=4, batch_size=8, steps=8, augment=True, progress="none")
    whole = two.run(train, config)[0]
    _, rest = half_and_rest(lambda one: two.run(train, one)[0], config, tmp_path, 6)
    assert same_bits(rest.state_dict, whole.state_dict)


def counted(config, victim, moment=0):
    """Train, and on rank `victim` count the calls that labkit.train makes, C functions such as `rename` included. At
    the call number `moment` this rank is killed, with no chance to clean up. Returns how many there were."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        if "labkit/train/" in frame.f_code.co_filename.replace(os.sep, "/"):
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        sys.setprofile(count)
    try:
        train(config)
    finally:
        sys.setprofile(None)
    return calls


def killed(ranks, config, moment, victim):
    """Whether the run was killed, or reached its end before."""
    try:
        ranks.run(counted, config, victim, moment)
    except RankError as error:
        assert error.kind == "death" and "SIGKILL" in str(error)
        return True
    return False


@pytest.mark.parametrize(("world_size", "kills"), [(1, 12), (2, 8)])
def test_killed_at_random_moments_a_run_ends_with_the_same_weights(tiny, tmp_path, world_size, kills):
    random.seed(world_size)
    config = dataclasses.replace(tiny, steps=40)
    with Ranks(world_size) as ranks:
        whole = ranks.run(train, config)[0]
        config = in_folder(config, tmp_path / "0", snapshot_every=3, resume=True)
        calls = max(ranks.run(counted, in_folder(config, tmp_path / "counted"), world_size - 1))
        deaths, reached = 0, set()
        while deaths < kills:
            # anywhere: in a step, in an evaluation, half-way through a snapshot
            if killed(ranks, config, random.randrange(1, calls // 2), random.randrange(world_size)):
                deaths += 1
                snapshot = latest_snapshot(f"{config.folder}/snapshots")
                reached.add(snapshot.step if snapshot else 0)
            else:  # it came to its end: once more from the beginning
                config = in_folder(config, tmp_path / str(deaths))
        last = ranks.run(train, config)[0]
    assert len(reached) > 3  # they did get somewhere in between
    assert last.step == config.steps
    assert same_bits(last.state_dict, whole.state_dict)


def test_metrics_of_steps_that_are_done_again_are_written_once(tiny, tmp_path):
    config = in_folder(tiny, tmp_path, steps=6, snapshot_every=4)
    train(config)
    for path in (tmp_path / "snapshots").iterdir():
        if path.name == "step-0000000006":
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    rest = train(dataclasses.replace(config, resume=True))
    assert rest.first_step == 4
    steps = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"kind": "train"' in line]
    assert [f'"step": {step},' in line for step, line in zip(range(1, 7), steps, strict=True)] == [True] * 6


def test_a_torn_snapshot_is_passed_over_and_told_of(tiny, tmp_path):
    config = in_folder(tiny, tmp_path, steps=6, snapshot_every=3)
    whole = train(config)
    file = tmp_path / "snapshots/step-0000000006/rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    rest = train(dataclasses.replace(config, resume=True))
    assert rest.first_step == 3 and "rank-0.safetensors has" in rest.refused[0]
    assert same_bits(rest.state_dict, whole.state_dict)


def test_a_folder_with_snapshots_is_not_trained_over(tiny, tmp_path):
    config = in_folder(tiny, tmp_path, steps=5)
    train(config)
    with pytest.raises(ConfigError, match="give resume=true to go on from step 5, or another folder"):
        train(config)


def test_resuming_with_other_settings_is_refused(tiny, two, tmp_path):
    config = in_folder(tiny, tmp_path, steps=5)
    train(config)
    with pytest.raises(ConfigError, match="resume: learning_rate=0.5, but the run in folder=.* has learning_rate=0.01"):
        train(dataclasses.replace(config, resume=True, learning_rate=0.5))
    with pytest.raises(ConfigError, match="resume: seed=1"):  # on ranks of its own the same error arrives
        train(dataclasses.replace(config, resume=True, seed=1, dp=2))


def test_a_run_that_is_complete_is_evaluated_when_it_is_resumed(tiny, tmp_path):
    config = in_folder(tiny, tmp_path, steps=6)
    first = train(config)
    again = train(dataclasses.replace(config, resume=True))
    assert again.losses == [] and again.step == 6
    assert again.accuracy == first.accuracy
