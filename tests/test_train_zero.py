"""`zero=1|2|3` trains as data parallel does, with everything else that can be set, and goes on at another stage."""

import itertools

import pytest
import torch
from train_runs import assert_identical, small_runs

from labkit.ranks import Ranks
from labkit.train import TrainConfig
from labkit.train.running import train

IMAGE, TEXT, TOKENS = small_runs(limit=60)
IMAGE["norm"] = "batch"


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.parametrize("workload", [IMAGE, TEXT, TOKENS], ids=["image", "text", "tokens"])
def test_every_stage_has_the_losses_and_weights_of_data_parallel_to_the_bit(two, workload):
    config = {**workload, "steps": 4}
    plain = two.run(train, TrainConfig(**config))[0]
    for stage in (1, 2, 3):
        assert_identical(two.run(train, TrainConfig(**config, zero=stage))[0], plain)


def test_every_stage_clips_by_the_norm_of_all_gradients(two):
    """Only the order differs in which its squares are summed."""
    config = {**IMAGE, "steps": 3, "clip": 0.5, "optimizer": "sgd", "precision": "float64"}
    plain = two.run(train, TrainConfig(**config))[0]
    for stage in (1, 2, 3):
        mine = two.run(train, TrainConfig(**config, zero=stage))[0]
        assert mine.gradient_norms == pytest.approx(plain.gradient_norms, rel=1e-12)
        assert mine.losses == pytest.approx(plain.losses, rel=1e-12)


@pytest.mark.parametrize(
    "together",
    [{}, {"precision": "bfloat16", "accumulate": 2}, {"accumulate": 3, "checkpoint": "2"}, {"checkpoint": "selective"}],
    ids=str,
)
@pytest.mark.parametrize("workload", [IMAGE, TEXT], ids=["image", "text"])
def test_it_goes_together_with_precision_accumulate_and_checkpoint(two, workload, together):
    config = {**workload, "steps": 3, **together}
    plain = two.run(train, TrainConfig(**config))[0]
    for stage in (1, 2, 3):
        assert_identical(two.run(train, TrainConfig(**config, zero=stage))[0], plain)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (0, 2), (3, 0)])
def test_a_run_goes_on_at_another_stage_to_the_bit(two, tmp_path, before, after):
    """Moments included: with AdamW, whose steps depend on all before."""
    whole = two.run(train, TrainConfig(**TEXT, steps=6))[0]
    common = {**TEXT, "folder": str(tmp_path)}
    two.run(train, TrainConfig(**common, steps=3, zero=before))
    after = two.run(train, TrainConfig(**common, steps=6, zero=after, resume=True))[0]
    assert after.first_step == 3
    assert after.losses == whole.losses[3:]
    assert all(torch.equal(after.state_dict[name], value) for name, value in whole.state_dict.items())


def test_a_run_goes_on_with_another_number_of_ranks(two, three, tmp_path):
    """In float64: sums run in another order."""
    config = {**TEXT, "precision": "float64"}
    whole = train(TrainConfig(**config, steps=6))
    common = {**config, "folder": str(tmp_path)}
    for (ranks, stage), steps in zip(itertools.product((three, two), (3, 2)), (2, 3, 5, 6), strict=True):
        last = ranks.run(train, TrainConfig(**common, steps=steps, zero=stage, resume=steps > 2))[0]
    assert last.losses == pytest.approx(whole.losses[5:], abs=1e-9)
    for name, value in whole.state_dict.items():
        torch.testing.assert_close(last.state_dict[name], value, rtol=0, atol=1e-9)


def test_float16_skips_together(two):
    """An overflow anywhere is one for all, whichever shard it is in."""
    config = {**TEXT, "steps": 4, "precision": "float16"}
    plain = two.run(train, TrainConfig(**config))[0]
    for stage in (2, 3):
        mine = two.run(train, TrainConfig(**config, zero=stage))[0]
        assert mine.losses == plain.losses and mine.skipped == plain.skipped
