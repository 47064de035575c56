"""The configuration: every setting says what it is, and what can't be is refused in one sentence."""

import dataclasses
import pickle

import pytest

from labkit.train import ConfigError, TrainConfig
from labkit.train.commands import train_command
from labkit.train.config import help_text


def refusal(**settings):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_texts_from_the_command_line_give_the_same_configuration_as_python():
    given = TrainConfig.from_arguments(
        ["workload=text", "batch_size=32", "learning_rate=1e-2", "resume=true", "folder=x"]
    )
    assert given == TrainConfig(workload="text", batch_size=32, learning_rate=0.01, resume=True, folder="x")


def test_the_parameters_of_a_notebook_are_keywords():
    parameters = {"workload": "tokens", "dp": 2, "clip": 1}
    assert TrainConfig(**parameters).clip == 1.0


def test_the_configuration_travels_and_is_replaced():
    config = TrainConfig(dp=2)
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, dp=3).world_size == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dp = 4


def test_every_setting_has_a_help_text_and_its_default_in_the_list():
    lines = help_text().splitlines()
    assert len(lines) == len(dataclasses.fields(TrainConfig))
    for one in dataclasses.fields(TrainConfig):
        assert one.metadata["help"]
        assert any(line.strip().startswith(f"{one.name}=") and one.metadata["help"] in line for line in lines)


def test_numbers_that_are_counted_have_a_unit():
    units = {one.name: one.metadata["unit"] for one in dataclasses.fields(TrainConfig)}
    assert units["batch_size"] == "samples" and units["warmup"] == "steps" and units["timeout"] == "seconds"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bach_size": 3}, "there is no setting bach_size: did you mean batch_size?"),
        ({"qqq": 3}, "there is no setting qqq; labkit train --help lists all"),
        ({"workload": "images"}, "workload=images must be one of image, text, tokens: did you mean image?"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number at least 1"),
        ({"batch_size": True}, "batch_size=True must be a whole number at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a number at least 0"),
        ({"learning_rate": "0.1"}, "learning_rate='0.1' must be a number at least 0"),
        ({"dropout": 1.0, "workload": "text"}, "dropout=1.0 must be a number at least 0 and below 1"),
        ({"timeout": 0}, "timeout=0.0 must be a number above 0"),
        ({"depth": 34}, "depth=34 must be one of 8, 18, 50"),
        ({"resume": "yes"}, "resume='yes' must be true or false"),
    ],
)
def test_an_unknown_or_wrong_setting_is_refused_with_the_nearest_known(settings, words):
    assert refusal(**settings) == words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dp": 2, "pp": 2}, "dp=2 and pp=2 together are not available yet"),
        ({"pp": 2, "precision": "float16"}, "precision=float16 with pp=2 is not available: give bfloat16"),
        ({"pp": 2, "backend": "nccl"}, "backend=nccl with pp=2 is not available yet"),
        ({"pp": 2, "accumulate": 2}, "accumulate=2 with pp=2: the pipeline cuts the batch by itself"),
        ({"pp": 2, "norm": "sync"}, "norm=sync normalises over all ranks, which with pp=2 compute other layers"),
        ({"pp": 2, "micro_batches": 9, "batch_size": 8}, "micro_batches=9 is more than batch_size=8"),
        ({"micro_batches": 4}, "micro_batches and pp_schedule belong to a pipeline: give pp too"),
        ({"tp": 2, "zero": 1}, "zero=1 and tp=2 together are not available yet: give one of them"),
        ({"tp": 2, "workload": "image", "norm": "sync"}, "norm=sync normalises over all ranks, which with tp=2"),
        ({"tp": 3, "workload": "text"}, "num_heads=4 can't be shared out evenly among tp=3 ranks: change one of them"),
        ({"zero": 1, "pp": 2}, "zero=1 and pp=2 together are not available yet: give one of them"),
        ({"accumulate": 5, "batch_size": 9, "dp": 2}, "accumulate=5 is more than the 4 samples of a rank's share of"),
        ({"checkpoint": "sqr"}, "checkpoint=sqr must be one of none, sqrt, selective, or a number of blocks from 1"),
        ({"checkpoint": "0"}, "checkpoint=0 must be one of none, sqrt, selective, or a number of blocks from 1"),
        ({"steps": 5, "epochs": 2}, "steps=5 and epochs=2 both say how long to train: give one"),
        ({"d_model": 64}, "d_model belongs to the workload text and tokens, not to image: leave it out"),
        ({"workload": "text", "norm": "group"}, "norm belongs to the workload image, not to text: leave it out"),
        ({"workload": "text", "d_model": 30}, "d_model=30 can't be split into num_heads=4 equal heads"),
        ({"momentum": 0.5}, "momentum belongs to optimizer=sgd"),
        ({"steps": 5, "warmup": 6}, "warmup=6 is longer than the run, steps=5"),
        ({"batch_size": 2, "dp": 4}, "batch_size=2 is the global batch, too small for dp=4 ranks"),
        ({"snapshot_every": 10}, "snapshot_every needs a folder for the snapshots"),
        ({"resume": True}, "resume needs a folder for the snapshots"),
        ({"data_folder": "x"}, "data_folder says where a known set lies unpacked: give its name too"),
    ],
)
def test_a_contradiction_or_what_is_not_available_is_refused(settings, words):
    assert words in refusal(**settings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["batchsize=3"], "there is no setting batchsize: did you mean batch_size?"),
        (["batch_size"], "'batch_size' must be name=value, as in batch_size=64"),
        (["dp=2", "dp=3"], "dp is given twice; give it once"),
        (["dp=two"], "dp=two must be a whole number at least 1"),
        (["resume=perhaps"], "resume=perhaps must be true or false"),
    ],
)
def test_the_command_says_so_and_ends_with_2(arguments, words, capsys):
    assert train_command(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"labkit train: {words}") and err.count("\n") == 1 and not out


def test_the_command_lists_the_settings(capsys):
    assert train_command(["--help"]) == 0
    assert "batch_size=64" in capsys.readouterr().out


def test_data_that_is_not_there_ends_in_a_sentence(capsys):
    assert train_command(["data=imagenet_t"]) == 1
    assert "There is no data set named 'imagenet_t'" in capsys.readouterr().err
