"""Precision and accumulation in training: what must stay the same, to what tolerance, and what is saved of it."""

import dataclasses
import json

import pytest
import torch

from labkit.memory import MemoryLedger
from labkit.record import Recorder
from labkit.train import TrainConfig, train
from labkit.train.computing import Computing
from labkit.train.loop import Loop
from labkit.train.running import make_strategy
from labkit.train.workloads import make_workload

SMALL = {"limit": 67, "test_limit": 21, "batch_size": 16, "progress": "none"}  # 3 samples are left for a last batch
TEXT = {"workload": "text", "d_model": 16, "num_heads": 2, "max_len": 16, "learning_rate": 0.01, **SMALL}
WORKLOADS = {
    "image": {"workload": "image", "norm": "group", **SMALL},
    "text": TEXT,
    "tokens": {**TEXT, "workload": "tokens", "limit": 30},
}
#: how far losses may be from those in float32, over 6 steps: bfloat16 has 8 bits of precision, float16 has 11
LOSS_TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3}

each_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)


def farthest(one, other):
    """The largest difference between two runs' losses, and between their weights."""
    losses = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    weights = max((one.state_dict[name] - value).abs().max().item() for name, value in other.state_dict.items())
    return losses, weights


# --- accumulation ---


@each_workload
@pytest.mark.parametrize("count", [2, 4])
def test_accumulating_changes_nothing_in_float64(two, workload, count):
    """In one process and on two ranks; also where a last batch has fewer samples than micro-batches."""
    config = TrainConfig(**workload, steps=6, precision="float64", clip=0.5, schedule="cosine")
    accumulating = dataclasses.replace(config, accumulate=count)
    whole = train(config)
    for run in (train(accumulating), two.run(train, accumulating)[0]):
        assert max(farthest(run, whole)) < 1e-9
        assert run.samples == whole.samples and run.accuracies == whole.accuracies
        assert run.gradient_norms == pytest.approx(whole.gradient_norms, abs=1e-9)


def test_accumulated_gradients_are_reduced_once(two):
    config = TrainConfig(**TEXT, steps=2, accumulate=4)
    nbytes = 4 * sum(parameter.numel() for parameter in make_workload(config).model.parameters())
    with Recorder() as record:
        two.run(train, config)
    sent = [span for span in record.ranks[0].events if span.name == "all_reduce" and span.details["bytes"] == nbytes]
    forwards = [span for span in record.ranks[0].events if span.kind == "forward"]
    assert (len(sent), len(forwards)) == (2, 8)


def test_where_ranks_meet_in_every_forward_they_run_equally_many(two):
    """SyncBatchNorm; the last batch has 3 samples, so that one rank has 2 and the other 1."""
    config = TrainConfig(**{**WORKLOADS["image"], "norm": "sync", "limit": 35}, epochs=1, accumulate=4)
    one, other = two.run(train, config)
    assert one.samples == 35 and len(one.losses) == 3 and one.losses == other.losses


def test_a_share_is_filled_up_with_samples_that_do_not_count():
    computing = Computing(accumulate=4)
    inputs, targets = torch.arange(6.0)[:, None], torch.arange(6)
    assert [len(part) for _, part in computing.cut(inputs, targets)] == [2, 2, 1, 1]
    assert [part.tolist() for _, part in computing.cut(inputs[:2], targets[:2])] == [[0], [1]]
    filled = computing.cut(inputs[:2], targets[:2], same_number=True)
    assert [part.tolist() for _, part in filled] == [[0], [1], [-100], [-100]]


# --- precision ---


@each_workload
@pytest.mark.parametrize("precision", LOSS_TOLERANCE)
def test_in_16_bits_the_losses_stay_near_those_in_float32(workload, precision):
    config = TrainConfig(**{**workload, "limit": 64}, steps=6, clip=0.5)
    narrow = train(dataclasses.replace(config, precision=precision))
    losses, _ = farthest(narrow, train(config))
    assert 0 < losses < LOSS_TOLERANCE[precision]
    assert {value.dtype for value in narrow.state_dict.values()} == {torch.float32}


def test_the_forward_computes_in_16_bits_and_the_loss_in_32():
    config = TrainConfig(**TEXT, precision="bfloat16")
    strategy = make_strategy(config)
    seen = []
    strategy.network.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    kept = strategy.workload.loss
    object.__setattr__(strategy.workload, "loss", lambda *given: seen.append(kept(*given).dtype) or kept(*given))
    batch = strategy.workload.train.batch(range(4))
    strategy.forward_backward(*batch, 0.25)
    strategy.evaluate(*batch)
    assert seen == [torch.bfloat16, torch.float32] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_whose_gradients_overflow_are_skipped_on_all_ranks(two, ranks):
    """A scale far too large is halved until the gradients fit; meanwhile nothing is learned."""
    config = TrainConfig(**TEXT, steps=12, precision="float16", clip=1.0)
    run = from_a_huge_scale if ranks == 1 else lambda one: two.run(from_a_huge_scale, one)[0]
    moved, scales, skipped = run(config)
    first = moved.index(True)
    assert skipped == moved.count(False) and first > 0
    assert scales[: first + 1] == [2.0 ** (22 - i) for i in range(first + 1)]


def from_a_huge_scale(config):
    """Whether each step moved the weights, the scales, and how many steps were skipped."""
    loop = Loop(config, make_strategy(config))
    loop.strategy.scaler.load_state_dict({**loop.strategy.scaler.state_dict(), "scale": 2.0**22})
    moved, before = [], None
    for _ in loop.steps():
        now = torch.cat([parameter.detach().flatten() for parameter in loop.strategy.model.parameters()])
        moved.append(before is None or not torch.equal(now, before))
        before = now
    moved[0] = loop.result.loss_scales[1] == loop.result.loss_scales[0]
    return moved, loop.result.loss_scales, loop.result.skipped


def test_only_float16_scales_the_loss_and_says_so(tmp_path):
    config = TrainConfig(**TEXT, steps=2, folder=str(tmp_path), precision="float16")
    assert train(config).loss_scales == [2.0**16, 2.0**16]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss_scale"] for line in lines if line["kind"] == "train"] == [2.0**16, 2.0**16]
    for other in ("float64", "float32", "bfloat16"):
        assert train(TrainConfig(**TEXT, steps=1, precision=other)).loss_scales == []


# --- all together ---


@each_workload
@pytest.mark.parametrize("precision", LOSS_TOLERANCE)
def test_all_together_on_two_ranks_are_near_one_process_without_them(two, workload, precision):
    config = TrainConfig(**{**workload, "limit": 64}, steps=6, precision=precision, clip=0.5)
    both, other = two.run(train, dataclasses.replace(config, accumulate=4, checkpoint="1"))
    assert farthest(both, train(config))[0] < LOSS_TOLERANCE[precision]
    assert both.losses == other.losses


@each_workload
@pytest.mark.parametrize("checkpoint", ["sqrt", "selective", "1", "2"])
def test_checkpointing_changes_no_bit(workload, checkpoint):
    dropout = {} if workload["workload"] == "image" else {"dropout": 0.1}
    config = TrainConfig(**workload, **dropout, steps=4, accumulate=2)
    plain, checkpointed = train(config), train(dataclasses.replace(config, checkpoint=checkpoint))
    assert farthest(checkpointed, plain) == (0, 0)


@pytest.mark.parametrize(("settings", "less"), [({"checkpoint": "1"}, 0.7), ({"accumulate": 4}, 0.3)], ids=str)
def test_both_hold_less_for_backward(settings, less):
    held = []
    for config in (TrainConfig(**TEXT), TrainConfig(**TEXT, **settings)):
        strategy = make_strategy(config)
        with MemoryLedger(strategy.model) as ledger:
            strategy.forward_backward(*strategy.workload.train.batch(range(16)), 1 / 16)
        held.append(ledger.peak.of("activations"))
    assert held[1] < less * held[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_resuming_with_all_of_them_gives_the_same_bits(two, tmp_path, ranks, precision):
    """The scaler grows every second step here, and goes on from where it was."""
    together = {"precision": precision, "accumulate": 3, "checkpoint": "1", "dropout": 0.1, "clip": 0.5}
    config = TrainConfig(**TEXT, **together, steps=8)
    run = (lambda one: growing(one)) if ranks == 1 else lambda one: two.run(growing, one)[0]
    whole = run(config)
    first = run(dataclasses.replace(config, steps=3, folder=str(tmp_path)))
    rest = run(dataclasses.replace(config, folder=str(tmp_path), resume=True))
    assert rest.first_step == 3
    assert first.losses + rest.losses == whole.losses
    assert first.loss_scales + rest.loss_scales == whole.loss_scales
    if precision == "float16":
        assert rest.loss_scales[:2] == [2.0**17, 2.0**18]  # neither what a new scaler has, nor when it would grow
    assert all(torch.equal(rest.state_dict[name], value) for name, value in whole.state_dict.items())


def growing(config):
    """A run whose scaler, if it has one, grows every second clean step."""
    strategy = make_strategy(config)
    if strategy.scaler is not None:
        strategy.scaler.set_growth_interval(2)
    with torch.random.fork_rng(devices=[]):
        return Loop(config, strategy, rank=strategy.share).run()


def test_accumulation_and_checkpointing_may_change_when_a_run_goes_on(tmp_path):
    config = TrainConfig(**TEXT, precision="float64", steps=6)
    whole = train(config)
    train(dataclasses.replace(config, steps=3, folder=str(tmp_path)))
    rest = train(dataclasses.replace(config, folder=str(tmp_path), resume=True, accumulate=4, checkpoint="1"))
    assert farthest(dataclasses.replace(whole, losses=whole.losses[3:]), rest)[0] < 1e-9
