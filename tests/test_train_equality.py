"""Training on ranks is training in one process: the same losses, the same weights, every test sample counted once."""

from functools import partial

import pytest
import torch
from train_runs import assert_close, small_runs

from labkit.data import GlobalBatches
from labkit.record import Recorder
from labkit.train import TrainConfig
from labkit.train.data_parallel import DataParallel
from labkit.train.running import make_strategy, train
from labkit.train.workloads import Workload, make_workload
from labkit.verify import CASES, assert_equivalent
from labkit.verify.splitting import even_sizes, split

IMAGE, TEXT, TOKENS = small_runs(limit=200)


@pytest.mark.parametrize("workload", [IMAGE, TEXT, TOKENS], ids=["image", "text", "tokens"])
def test_two_ranks_have_the_losses_of_one_over_20_steps_in_float64(two, workload):
    config = TrainConfig(**workload, steps=20, precision="float64")
    one, (both, _) = train(config), two.run(train, config)
    assert len(one.losses) == 20 and min(one.losses) < one.losses[0] - 0.05
    assert_close(one, both)


@pytest.mark.parametrize("workload", [IMAGE, TEXT, TOKENS], ids=["image", "text", "tokens"])
def test_two_ranks_have_the_first_loss_of_one_in_float32(two, workload):
    config = TrainConfig(**workload, steps=1)
    assert abs(train(config).losses[0] - two.run(train, config)[0].losses[0]) < 1e-5


def test_ranks_of_its_own_give_what_ranks_that_are_here_give(two):
    config = TrainConfig(**TEXT, steps=3, dp=2)
    mine = train(config)
    assert mine.losses == two.run(train, config)[0].losses
    assert mine.world_size == 2


def replayed(config, ranks, steps):
    """The losses and the state that a run with BatchNorm on `ranks` must have: one process, share by share."""
    workload = make_workload(config)
    model, loss = workload.model, workload.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0)
    losses = []
    batches = iter(GlobalBatches(len(workload.train), batch_size=config.batch_size, num_replicas=1, rank=0))
    for _ in range(steps):
        inputs, targets = workload.train.batch(next(batches))
        optimizer.zero_grad()
        total, sizes = 0.0, even_sizes(len(targets), ranks)
        for rank, (some, wanted) in enumerate(zip(split(inputs, sizes), split(targets, sizes), strict=True)):
            share = loss(model(some), wanted)
            share.backward()
            total += share.item()
            if rank == 0:
                statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(statistics[name])
        for parameter in model.parameters():
            parameter.grad.div_(len(targets))
        optimizer.step()
        losses.append(total / len(targets))
    return losses, model.state_dict()


def test_with_batch_norm_two_ranks_are_the_replay_of_their_shares(two):
    config = TrainConfig(**{**IMAGE, "norm": "batch"}, steps=20, precision="float64")
    losses, state = replayed(config, 2, 20)
    both = two.run(train, config)[0]
    assert max(abs(a - b) for a, b in zip(losses, both.losses, strict=True)) < 1e-9
    for name, value in state.items():
        torch.testing.assert_close(both.state_dict[name], value, rtol=0, atol=1e-9)
    assert train(config).losses != pytest.approx(losses, abs=1e-6)  # the whole batch's statistics are others


def test_with_sync_norm_two_ranks_have_the_losses_of_one_with_batch_norm(two):
    config = TrainConfig(**{**IMAGE, "norm": "sync"}, steps=20, precision="float64")
    one, (both, _) = (
        train(TrainConfig(**{**IMAGE, "norm": "batch"}, steps=20, precision="float64")),
        two.run(train, config),
    )
    assert max(abs(a - b) for a, b in zip(one.losses, both.losses, strict=True)) < 1e-9
    for name, value in one.state_dict.items():
        torch.testing.assert_close(both.state_dict[name], value, rtol=0, atol=1e-9)


def test_every_test_sample_counts_once_whatever_the_number_of_ranks(two):
    config = TrainConfig(**TEXT, steps=1, precision="float64")
    strategy = make_strategy(config)
    train(config)
    shown = two.run(train, config)[0].evaluations[-1]
    data = strategy.workload.test
    assert shown.samples == len(data) == 21  # 17 and 4: the ranks' shares are 9 and 8, then 2 and 2


def test_a_rank_without_a_sample_in_the_last_batch_changes_nothing(two):
    config = TrainConfig(**{**TEXT, "limit": 18}, epochs=2, precision="float64")
    one, both = train(config), two.run(train, config)[0]
    assert one.samples == both.samples == 36
    assert one.losses == pytest.approx(both.losses, abs=1e-12)


class Averaging:
    """The loop's strategy as the harness wants it."""

    def __init__(self, module, loss, optimizer, *, unused):
        workload = Workload(None, None, module, "")
        self.strategy = DataParallel(workload, optimizer, torch.device("cpu"), find_unused_parameters=unused)

    def step(self, inputs, targets):
        strategy = self.strategy
        sizes = even_sizes(len(targets), strategy.shares)
        mine = [split(value, sizes)[strategy.share] for value in (inputs, targets)]
        (weight,) = strategy.sum_over_ranks([strategy.workload.weight(mine[1])])
        strategy.forward_backward(*mine, strategy.shares / weight)
        self.grads = {name: parameter.grad for name, parameter in strategy.model.named_parameters()}
        strategy.step()

    def full_grads(self):
        return self.grads

    def full_params(self):
        return dict(self.strategy.model.named_parameters())

    def full_buffers(self):
        self.strategy.synchronise_buffers()
        return dict(self.strategy.model.named_buffers())


@pytest.mark.parametrize("case", CASES)
def test_the_strategy_equals_one_process_on_every_awkward_model(two, case):
    chosen = CASES[case]
    sgd, adamw = (partial(kind, lr=0.01) for kind in (torch.optim.SGD, torch.optim.AdamW))
    check = partial(
        assert_equivalent,
        chosen.build,
        chosen.batch(),
        chosen.loss,
        partial(Averaging, unused=chosen.unused),
        2,
        reference=chosen.reference,
        ranks=two,
    )
    assert check(optimizer=sgd, start="rank0").identical
    assert check(optimizer=adamw, dtype=torch.float64).identical


def test_a_step_sends_its_gradients_in_one_collective_of_known_size():
    config = TrainConfig(**IMAGE, steps=2, dp=2, folder="")
    parameters = [parameter.numel() for parameter in make_workload(config).model.parameters()]
    with Recorder() as record:
        train(config)
    nbytes = 4 * sum(parameters)  # less than the first bucket's megabyte
    sent = [span for span in record.ranks[0].events if span.name == "all_reduce" and span.details["bytes"] == nbytes]
    assert len(sent) == 2
    kinds = {span.kind for span in record.ranks[1].events}
    assert {"data", "forward", "backward", "communication", "step"} <= kinds
