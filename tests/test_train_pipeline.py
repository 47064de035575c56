"""`labkit train pp=2`: the losses and weights of one process, whatever the schedule, saved and resumed like any run."""

from dataclasses import replace

import pytest
import torch
from train_runs import assert_close, small_runs

from labkit.train import ConfigError, TrainConfig
from labkit.train.running import train

IMAGE, TEXT, TOKENS = small_runs(limit=200, precision="float64")


@pytest.mark.parametrize(
    ("workload", "steps", "options"),
    [
        (IMAGE, 4, {}),
        (TEXT, 14, {"pp_schedule": "gpipe", "micro_batches": 3}),
        (TOKENS, 6, {"pp_schedule": "zb-h1", "clip": 0.1}),
        (TEXT, 4, {"checkpoint": "1", "pp_schedule": "naive"}),
    ],
    ids=["image", "text", "tokens", "checkpointed"],
)
def test_two_stages_have_the_losses_and_weights_of_one_process(two, workload, steps, options):
    """Also in the last, shorter batch of an epoch, the 12th of the texts."""
    config = TrainConfig(**workload, steps=steps, pp=2, **options)
    clip = {"clip": options["clip"]} if "clip" in options else {}
    one = train(TrainConfig(**workload, steps=steps, **clip))
    assert_close(one, two.run(train, config)[0])


def test_it_starts_ranks_of_its_own_and_trains_in_bfloat16(two):
    config = TrainConfig(**{**TEXT, "precision": "bfloat16", "limit": 60}, steps=2, pp=2)
    mine = train(config)
    assert mine.world_size == 2 and mine.losses == two.run(train, config)[0].losses
    assert mine.losses[0] == pytest.approx(train(TrainConfig(**TEXT, steps=1)).losses[0], rel=0.02)


def test_a_snapshot_of_two_stages_goes_on_in_one_process_and_back(two, tmp_path):
    config = TrainConfig(**TOKENS, steps=6, pp=2, folder=str(tmp_path), snapshot_every=2)
    two.run(train, replace(config, steps=2))
    alone = train(replace(config, steps=4, pp=1, resume=True))
    assert alone.first_step == 2
    both = two.run(train, replace(config, resume=True))[0]
    whole = train(TrainConfig(**TOKENS, steps=6))
    assert both.first_step == 4 and both.losses == pytest.approx(whole.losses[4:], abs=1e-9)
    for name, value in whole.state_dict.items():
        torch.testing.assert_close(both.state_dict[name], value, rtol=0, atol=1e-9)


def test_more_stages_than_layers_are_refused(two):
    with pytest.raises(ConfigError, match="pp=5: split_model: Transformer has 4 steps and can't make 5 stages"):
        train(TrainConfig(**TEXT, steps=1, pp=5))
