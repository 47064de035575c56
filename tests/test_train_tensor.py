"""`labkit train tp=2`: the losses and weights of one process, on every workload, saved and resumed like any run."""

from dataclasses import replace

import pytest
import torch
from train_runs import assert_close, small_runs

from labkit.train import ConfigError, TrainConfig
from labkit.train.running import train

IMAGE, TEXT, TOKENS = small_runs(limit=120, precision="float64")


@pytest.mark.parametrize(
    ("workload", "options"),
    [(IMAGE, {"norm": "batch"}), (TEXT, {"accumulate": 2}), (TOKENS, {"clip": 0.1, "checkpoint": "1"})],
    ids=["image", "text", "tokens"],
)
def test_two_ranks_have_the_losses_and_weights_of_one_process(two, workload, options):
    """Also in the last, shorter batch of an epoch. Clipping counts every slice once."""
    if workload is IMAGE:
        workload = {**workload, **options}
        options = {}
    one = train(TrainConfig(**workload, **options, steps=8))
    both = two.run(train, TrainConfig(**workload, **options, steps=8, tp=2))[0]
    assert min(one.losses) < one.losses[0] - 0.02
    assert_close(one, both)
    assert both.gradient_norms == pytest.approx(one.gradient_norms, abs=1e-9)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_it_starts_ranks_of_its_own_and_trains_in_16_bits(precision):
    config = TrainConfig(**{**TOKENS, "precision": precision, "limit": 60}, steps=2, tp=2)
    found = train(config)
    assert found.world_size == 2
    assert found.losses[0] == pytest.approx(train(TrainConfig(**TOKENS, steps=1)).losses[0], rel=0.02)


def test_a_snapshot_of_two_ranks_goes_on_in_one_process_and_back(two, tmp_path):
    config = TrainConfig(**TOKENS, steps=6, tp=2, folder=str(tmp_path), snapshot_every=2)
    two.run(train, replace(config, steps=2))
    alone = train(replace(config, steps=4, tp=1, resume=True))
    assert alone.first_step == 2
    both = two.run(train, replace(config, resume=True))[0]
    whole = train(TrainConfig(**TOKENS, steps=6))
    assert both.first_step == 4 and both.losses == pytest.approx(whole.losses[4:], abs=1e-9)
    for name, value in whole.state_dict.items():
        torch.testing.assert_close(both.state_dict[name], value, rtol=0, atol=1e-9)


def test_with_dropout_the_ranks_draw_alike_and_a_resumed_run_draws_on(two, tmp_path):
    """Different masks on the two ranks would tear what they both hold apart."""
    config = TrainConfig(**TEXT, dropout=0.3, steps=4, tp=2)
    whole = two.run(train, config)
    saved = replace(config, folder=str(tmp_path), snapshot_every=2)
    two.run(train, replace(saved, steps=2))
    resumed = two.run(train, replace(saved, resume=True))
    assert whole[0].losses == whole[1].losses
    assert resumed[0].losses == whole[0].losses[2:]


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="tp=3: ChannelParallel: layer1.0.bn1 has 4 groups, which can't be shared"):
        train(TrainConfig(**IMAGE, steps=1, tp=3))
