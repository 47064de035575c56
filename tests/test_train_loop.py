"""The loop: schedules, clipping, evaluation, metrics, progress, and that a seed decides everything."""

import dataclasses
import json
import math

import pytest
import torch

from labkit.data.errors import DataError
from labkit.train import ConfigError, TrainConfig, train
from labkit.train.loop import Loop
from labkit.train.running import make_strategy
from labkit.train.schedules import learning_rate_factor

TEXT = TrainConfig(
    workload="text", d_model=16, num_heads=2, max_len=16, limit=300, test_limit=21, batch_size=16, steps=6,
    learning_rate=0.01, progress="none",
)  # fmt: skip


def changed(**changes):
    return dataclasses.replace(TEXT, **changes)


# --- the learning rate ---


def rates(schedule, total=10, warmup=4):
    return [learning_rate_factor(step, total=total, schedule=schedule, warmup=warmup) for step in range(total)]


def test_the_learning_rate_rises_in_equal_parts_and_reaches_its_largest_in_the_last_step_of_warmup():
    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_the_schedules_are_pytorchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    for schedule, theirs in (
        ("constant", torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([parameter], 1.0), 1.0)),
        ("linear", torch.optim.lr_scheduler.LinearLR(torch.optim.SGD([parameter], 1.0), 1.0, 0.0, 10)),
        ("cosine", torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([parameter], 1.0), 10)),
    ):
        for step in range(10):
            assert rates(schedule, warmup=0)[step] == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
            theirs.optimizer.step()
            theirs.step()


def test_a_run_uses_the_schedule():
    result = train(changed(schedule="cosine", warmup=2))
    expected = [0.005, 0.01, *(0.005 * (1 + math.cos(math.pi * i / 4)) for i in range(4))]
    assert result.learning_rates == pytest.approx(expected)


def test_each_step_is_taken_with_the_learning_rate_that_is_told():
    config = changed(schedule="linear", warmup=3)
    loop = Loop(config, make_strategy(config))
    used = [(loop.strategy.optimizer.param_groups[0]["lr"], step.learning_rate) for step in loop.steps()]
    assert all(rate == told for rate, told in used) and len(set(used)) > 3


# --- training ---


def test_training_learns():
    result = train(changed(steps=0, epochs=6))
    assert result.losses[-1] < 0.7 * result.losses[0]
    assert result.step == 6 * math.ceil(300 / 16)
    assert result.samples == 6 * 300


def test_the_seed_decides_everything_and_the_callers_random_numbers_stay():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    config = changed(dropout=0.2)
    first, again, other = train(config), train(config), train(changed(dropout=0.2, seed=1))
    assert first.losses == again.losses
    assert first.losses != other.losses
    assert torch.equal(torch.rand(1), expected)


def test_float64_starts_from_the_weights_of_float32():
    wide, narrow = (make_strategy(changed(precision=kind)).model.state_dict() for kind in ("float64", "float32"))
    assert all(torch.equal(wide[name], narrow[name].double()) for name in wide)


def test_the_loss_of_a_step_is_the_mean_over_valid_tokens():
    config = changed(workload="tokens", steps=1)
    strategy = make_strategy(config)
    data, model = strategy.workload.train, strategy.model
    batch = next(iter(Loop(config, strategy).train.sampler))
    inputs, targets = data.batch(batch)
    expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert train(config).losses[0] == pytest.approx(expected.item(), abs=1e-6)


def test_clipping_bounds_what_a_step_may_do():
    config = changed(optimizer="sgd", momentum=0.0, steps=1, learning_rate=1.0)
    before = make_strategy(config).model.state_dict()
    result = train(dataclasses.replace(config, clip=0.01))
    moved = math.sqrt(sum((result.state_dict[name] - before[name]).pow(2).sum().item() for name in before))
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert result.gradient_norms[0] > 0.1


def test_loader_processes_give_the_same_losses():
    assert train(changed(workers=2)).losses == train(TEXT).losses


def test_a_folder_in_the_layout_of_image_folder_trains(tmp_path):
    from PIL import Image

    for split, count in (("train", 4), ("val", 2)):
        for label, colour in (("dark", 30), ("light", 220)):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (24, 20), (colour, colour + i, colour)).save(tmp_path / split / label / f"{i}.png")
    config = TrainConfig(
        data=str(tmp_path), image_size=16, norm="group", batch_size=4, epochs=8, augment=True, progress="none"
    )
    result = train(config)
    assert result.evaluations[-1].samples == 4 and result.accuracy == 1.0


# --- evaluation ---


def test_evaluation_is_the_mean_over_all_samples_whatever_the_batch_size():
    config = changed(steps=1)
    strategy = make_strategy(config)
    loops = [Loop(dataclasses.replace(config, batch_size=size), strategy) for size in (16, 5, 21)]
    shown = [loop.evaluate() for loop in loops]
    inputs, targets = strategy.workload.test.batch(range(21))
    strategy.model.eval()
    output = strategy.model(inputs)
    assert {one.samples for one in shown} == {21}
    assert {one.accuracy for one in shown} == {(output.argmax(1) == targets).sum().item() / 21}
    for one in shown:
        assert one.loss == pytest.approx(torch.nn.functional.cross_entropy(output, targets).item(), abs=1e-6)


def test_dropout_is_off_in_evaluation_and_on_again_after():
    config = changed(dropout=0.5)
    loop = Loop(config, make_strategy(config))
    assert loop.evaluate() == loop.evaluate()
    assert loop.strategy.model.training


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"steps": 6, "eval_every": 4}, [4, 6]), ({"steps": 6}, [6]), ({"steps": 0, "epochs": 2}, [19, 38])],
)
def test_evaluations_come_as_often_as_asked_and_at_the_end(settings, steps):
    assert [one.step for one in train(changed(**settings)).evaluations] == steps


# --- what is written and shown ---


def test_metrics_are_lines_of_json_and_tensorboard(tmp_path):
    config = changed(folder=str(tmp_path), clip=1.0, eval_every=3)
    result = train(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["loss"] for line in steps] == result.losses
    assert set(steps[0]) >= {
        "step",
        "epoch",
        "loss",
        "accuracy",
        "learning_rate",
        "gradient_norm",
        "samples_per_second",
    }
    tests = [line for line in lines if line["kind"] == "test"]
    assert [(line["step"], line["loss"]) for line in tests] == [(one.step, one.loss) for one in result.evaluations]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [event.value for event in board.Scalars("train/loss")]
    assert shown == pytest.approx(result.losses, abs=1e-6)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(TEXT)
    assert list(tmp_path.iterdir()) == []


def test_progress_shows_loss_accuracy_and_speed_by_lines_or_a_bar(capsys):
    train(changed(progress="lines"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[0].startswith("step 1/6: loss 2.") and lines[0].endswith("samples/s")
    assert lines[-1].startswith("step 6/6: test loss ")
    train(changed(progress="bar"))
    assert "samples/s" in capsys.readouterr().out.split("\r")[-1]
    train(TEXT)
    assert capsys.readouterr().out == ""


def test_the_result_says_what_came_of_it():
    assert "6 steps, 1 rank, " in str(train(TEXT)) and "test accuracy" in str(train(TEXT))


# --- what goes wrong ---


def test_an_error_in_the_data_is_the_same_in_one_process_and_on_ranks():
    for config in (changed(data="no-such-set"), changed(data="no-such-set", dp=2)):
        with pytest.raises(DataError, match="There is no data set named 'no-such-set'"):
            train(config)


def test_a_warmup_longer_than_the_epochs_is_refused():
    with pytest.raises(ConfigError, match="warmup=20 is longer than the run of 19 steps"):
        train(changed(steps=0, warmup=20))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here are GPUs")
@pytest.mark.parametrize("dp", [1, 2])
def test_a_backend_for_gpus_is_refused_where_there_are_none(dp):
    with pytest.raises(ConfigError, match=f"backend=nccl needs a GPU for every rank, {dp}, and there are 0"):
        train(changed(backend="nccl", dp=dp))
