"""Accumulated micro-batches are one large batch: in gradients, weights and bytes, and what ends in a sentence."""

import copy
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.collectives.formulas import all_reduce_sent
from labkit.memory import accumulate
from labkit.mesh import clip_grad_norm_
from labkit.parallel import DistributedDataParallel
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder
from labkit.verify import CASES, NotEquivalentError, assert_equivalent
from labkit.verify.awkward import classes_loss, plain, tokens_loss, vectors
from labkit.verify.splitting import even_sizes, split

sgd = partial(torch.optim.SGD, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


def parts_of(inputs, targets, count):
    """A share in `count` micro-batches, fewer where it has fewer rows."""
    sizes = [size for size in even_sizes(len(targets), count) if size]
    return list(zip(split(inputs, sizes), split(targets, sizes), strict=True))


class Accumulating:
    """A stepper for the harness: this rank's share in `count` micro-batches, or what `cut` makes of it."""

    def __init__(
        self, module, loss, optimizer, *, count=3, cut=None, wrap=DistributedDataParallel, after=None, **given
    ):
        self.wrapper, self.loss, self.given = wrap(module), loss, given
        self.cut, self.after = cut or partial(parts_of, count=count), after
        self.optimizer = optimizer(self.wrapper.parameters())

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = [split(value, even_sizes(len(value), size))[rank] for value in (inputs, targets)]
        accumulate(self.wrapper, self.cut(*mine), self.loss, **self.given)
        if self.after:
            self.after(self)
        self.optimizer.step()

    def full_grads(self):
        return {name: parameter.grad for name, parameter in self.wrapper.module.named_parameters()}

    def full_params(self):
        return dict(self.wrapper.module.named_parameters())

    def full_buffers(self):
        return dict(self.wrapper.module.named_buffers())


def equivalent(ranks, case, optimizer=sgd, dtype=torch.float32, steps=3, **given):
    chosen = CASES[case]
    count = 2 if chosen.reference == "replay" else 3
    way = partial(Accumulating, **{"count": count} | given)
    if chosen.unused:
        way = partial(way, wrap=partial(DistributedDataParallel, find_unused_parameters=True))
    return assert_equivalent(
        chosen.build, chosen.batch(), chosen.loss, way, ranks.world_size, optimizer, steps=steps,
        dtype=dtype, ranks=ranks, reference=chosen.reference, micro_batches=count,
    )  # fmt: skip


# --- equality ---


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_equal_one_process_with_the_whole_batch(ranks, case):
    """With BatchNorm and dropout, which see one micro-batch at a time, one process that replays them."""
    assert equivalent(ranks, case).identical
    assert equivalent(ranks, case, optimizer=adamw, dtype=torch.float64).identical


@pytest.mark.parametrize("case", ["image", "text", "tokens"])
def test_fifty_steps_stay_together(two, case):
    assert equivalent(two, case, dtype=torch.float64, steps=50).errors["weights"] < 1e-9


@pytest.mark.parametrize("count", [1, 2, 8])
def test_however_many_micro_batches_in_a_plain_module(count):
    inputs, targets = vectors(7)
    module = plain().double()
    truth = copy.deepcopy(module)
    F.cross_entropy(truth(inputs.double()), targets).backward()
    told = accumulate(module, zip(inputs.double().chunk(count), targets.chunk(count), strict=True), classes_loss)
    for ours, exact in zip(module.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, exact.grad, rtol=0, atol=1e-12)
    assert told.weight == told.global_weight == 7
    mean = F.cross_entropy(truth(inputs.double()), targets)
    torch.testing.assert_close(told.loss_sum / told.global_weight, mean.detach(), rtol=0, atol=1e-12)


def fewer_on_the_last(inputs, targets):
    """The last rank has one micro-batch, the others one for each row."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return parts_of(inputs, targets, 1 if last else len(targets))


def one_without_valid_tokens(inputs, targets):
    """Before the rank's own rows come some whose targets don't count."""
    return [(inputs, torch.full_like(targets, -100)), *parts_of(inputs, targets, 2)]


def streamed(inputs, targets):
    yield from parts_of(inputs, targets, 3)


@pytest.mark.parametrize("cut", [fewer_on_the_last, one_without_valid_tokens, streamed])
def test_ranks_may_cut_their_shares_as_they_like(ranks, cut):
    equivalent(ranks, "tokens", dtype=torch.float64, cut=cut)


def test_a_rank_whose_targets_do_not_count_takes_part(two):
    def tokens(rows=4):
        inputs, targets = CASES["tokens"].batch()
        return inputs[:rows], torch.cat([targets[: rows // 2], torch.full_like(targets[rows // 2 : rows], -100)])

    way = partial(Accumulating, count=2)
    assert_equivalent(CASES["tokens"].build, tokens(), tokens_loss, way, 2, sgd, dtype=torch.float64, ranks=two)


def test_gradients_are_added_to_those_that_are_there():
    inputs, targets = vectors(6)
    module = plain()
    accumulate(module, parts_of(inputs, targets, 2), classes_loss)
    once = [parameter.grad.clone() for parameter in module.parameters()]
    accumulate(module, parts_of(inputs, targets, 3), classes_loss)
    for parameter, one in zip(module.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * one)


class MultiplyBy8:
    """The part of a scaler that accumulation knows."""

    def scale(self, loss):
        return 8.0 * loss


def unscale_and_clip(stepper):
    for parameter in stepper.wrapper.parameters():
        parameter.grad.div_(8.0)
    clip_grad_norm_(stepper.wrapper.parameters(), 0.05)


class Clipping:
    """The truth with clipping: the whole batch in one backward on every rank."""

    def __init__(self, module, loss, optimizer):
        self.module, self.loss, self.optimizer = module, loss, optimizer(module.parameters())

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        total, weight = self.loss(self.module(inputs), targets)
        (total / weight).backward()
        clip_grad_norm_(self.module.parameters(), 0.05)
        self.optimizer.step()


def trained_with(kind, steps, **given):
    """Weights after `steps` steps with a learning rate that falls."""
    case = CASES["tokens"]
    torch.manual_seed(0)
    stepper = kind(case.build().double(), case.loss, adamw, **given)
    schedule = torch.optim.lr_scheduler.LambdaLR(stepper.optimizer, lambda step: 0.5**step)
    for _ in range(steps):
        stepper.step(*case.batch())
        schedule.step()
    return [parameter.detach().clone() for parameter in stepper.optimizer.param_groups[0]["params"]]


def test_with_a_scaler_clipping_and_a_schedule_too(two):
    """The norm that is clipped is that of the whole step, once it is unscaled."""
    found = two.run(trained_with, Accumulating, 4, count=3, scaler=MultiplyBy8(), after=unscale_and_clip)
    exact = two.run(trained_with, Clipping, 4)[0]
    for mine in found:
        for ours, truth in zip(mine, exact, strict=True):
            torch.testing.assert_close(ours, truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, nn.parallel.DistributedDataParallel])
def test_pytorchs_wrapper_accumulates_alike(two, wrap):
    equivalent(two, "tokens", dtype=torch.float64, wrap=wrap)


def test_an_optimizer_that_reduces_is_named_as_reducer(two):
    """As where no wrapper stands around the module."""

    def way(module, loss, optimizer):
        wrapper = DistributedDataParallel(module)
        return Accumulating(module, loss, optimizer, wrap=lambda _: wrapper, count=3, reducer=wrapper)

    case = CASES["tokens"]
    assert_equivalent(case.build, case.batch(), case.loss, way, 2, sgd, dtype=torch.float64, ranks=two)


# --- the weight ---


def nine_outputs_deep(output, targets):
    """A loss that looks at the shape of its output, so that it can't tell its weight without one."""
    _, _, classes = output.shape
    return tokens_loss(output.view(-1, classes), targets.flatten())


def test_a_loss_that_needs_an_output_to_tell_its_weight_is_given_one(two):
    case = CASES["tokens"]
    way = partial(Accumulating, count=3)
    assert_equivalent(
        case.build, case.batch(), nine_outputs_deep, way, 2, sgd, dtype=torch.float64, ranks=two
    )  # fmt: skip


def test_asking_for_the_weight_leaves_no_trace():
    """With such a loss forward runs once more: not in the statistics, nor in the random numbers."""
    module = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 5))
    inputs, targets = vectors(8)

    def needs_output(output, targets):
        return classes_loss(output, targets)[0], len(output)

    gradients = []
    for loss in (classes_loss, needs_output):
        mine = copy.deepcopy(module)
        torch.manual_seed(3)
        accumulate(mine, parts_of(inputs, targets, 2), loss)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in mine.parameters()]))
        assert mine[1].num_batches_tracked == 2 and mine.training
    assert torch.equal(*gradients)


def test_forward_runs_once_for_each_micro_batch_where_the_targets_tell_the_weight():
    calls = []
    module = plain()
    module.register_forward_hook(lambda *_: calls.append(1))
    accumulate(module, parts_of(*vectors(8), 4), classes_loss)
    accumulate(module, parts_of(*vectors(8), 4), classes_loss, weight=len)
    assert len(calls) == 8


def goes_through(output, targets):
    """Goes through an output row by row, of which an unknown one would have no end."""
    return sum(row.sum() for row in output), len(targets)


def test_a_loss_that_goes_through_its_output_is_given_one():
    accumulate(plain(), parts_of(*vectors(8), 4), goes_through)


def test_asking_for_the_weight_draws_no_random_numbers():
    """Neither in a forward that is run for it, though its noise heeds no mode, nor in the loss."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 5)

        def forward(self, x):
            return self.layer(F.dropout(x, 0.5))

    def noisy_loss(output, targets):
        return classes_loss(output, targets)[0] * torch.rand(()), len(output)

    torch.manual_seed(0)
    module, gradients = Noisy(), []
    for options in ({}, {"weight": len}):
        mine = copy.deepcopy(module)
        torch.manual_seed(3)
        accumulate(mine, parts_of(*vectors(8), 2), noisy_loss, **options)
        gradients.append(mine.layer.weight.grad)
    assert torch.equal(*gradients)


# --- memory and bytes ---


def test_nothing_of_a_micro_batch_is_left_when_the_next_one_begins():
    outputs, module = [], plain()

    def forward(inputs):
        assert not any(output() is not None for output in outputs)
        output = module(inputs)
        outputs.append(weakref.ref(output))
        return output

    accumulate(forward, parts_of(*vectors(8), 4), classes_loss)
    assert len(outputs) == 4


def sent(count, no_sync=True):
    """Reductions of gradients in a step, and all bytes that this rank sends, once the buckets are arranged."""
    torch.manual_seed(0)
    wrapper = DistributedDataParallel(CASES["text"].build())
    batch = CASES["text"].batch()
    parts = parts_of(*batch, count)
    accumulate(wrapper, parts, classes_loss)
    with Recorder() as record:
        if no_sync:
            accumulate(wrapper, parts, classes_loss)
        else:
            for inputs, targets in parts:
                classes_loss(wrapper(inputs), targets)[0].backward()
    gradients = sum(parameter.numel() for parameter in wrapper.parameters())
    whole = [span for span in record.events if span.name == "all_reduce" and span.details["bytes"] == 4 * gradients]
    return len(whole), record.bytes_sent, gradients


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_are_reduced_once_whatever_the_number_of_micro_batches(ranks, count):
    """Beside them go 16 bytes that agree on the weight."""
    size = ranks.world_size
    for rank, (times, total, gradients) in enumerate(ranks.run(sent, count)):
        weights = all_reduce_sent("ring", 2, 8, size).bytes[rank]
        assert times == 1
        assert total == all_reduce_sent("ring", gradients, 4, size).bytes[rank] + weights


def test_without_no_sync_they_are_reduced_for_every_micro_batch(two):
    for times, total, gradients in two.run(sent, 4, no_sync=False):
        assert times == 4
        assert total == 4 * all_reduce_sent("ring", gradients, 4, 2).bytes[0]


# --- where exactly ends ---


def test_batch_norm_sees_micro_batches_and_is_not_the_whole_batch(two):
    case = CASES["batch norm"]
    with pytest.raises(NotEquivalentError, match="BatchNorm"):
        assert_equivalent(case.build, case.batch(), case.loss, partial(Accumulating, count=2), 2, sgd, ranks=two)


# --- what goes wrong ---

BAD = [
    ([], classes_loss, ValueError, "accumulate: there are no micro-batches: give each rank one at least"),
    ([torch.zeros(2, 6)], classes_loss, TypeError, "micro-batch 0 is a Tensor: give pairs of (inputs, targets)"),
    ([(1, 2, 3)], classes_loss, TypeError, "micro-batch 0 is 3 things: give pairs"),
    ([vectors(2)], lambda o, t: F.cross_entropy(o, t), TypeError, "returned a Tensor for micro-batch 0: it must"),
    (5, classes_loss, TypeError, "given Sequential, int, function: give a module, pairs"),
    (
        [vectors(2)],
        lambda o, t: (o, 2),
        TypeError,
        "the loss sum of micro-batch 0 is of shape [2, 5]: return one number",
    ),
    ([vectors(2)], lambda o, t: (1.5, 2), TypeError, "the loss sum of micro-batch 0 is a float: return one number"),
    ([vectors(2)], lambda o, t: (o.detach().sum(), 2), RuntimeError, "is it detached, every parameter frozen, or"),
    (
        [vectors(2)],
        lambda o, t: (torch.as_tensor(o).sum(), 2) if isinstance(o, torch.Tensor) else (o, 1),
        ValueError,
        "loss(), asked without an output, says that this rank's micro-batches weigh 1, loss() says 2: give as weight=",
    ),
    ([vectors(2)], lambda o, t: (o.sum(), 0), ValueError, "the weight of all micro-batches is 0, so that"),
    ([vectors(2)], lambda o, t: (o.sum(), -1), ValueError, "the weight that loss() gives for micro-batch 0 is -1:"),
    ([vectors(2)], lambda o, t: (o.sum(), t), ValueError, "for micro-batch 0 is a Tensor: give the number of samples"),
]


@pytest.mark.parametrize(("parts", "loss", "kind", "words"), BAD, ids=[words[:40] for *_, words in BAD])
def test_bad_input_ends_in_a_sentence(parts, loss, kind, words):
    with pytest.raises(kind) as caught:
        accumulate(plain(), parts, loss)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_weight_that_counts_otherwise_than_the_loss_is_noticed():
    with pytest.raises(ValueError, match=r"weight= says that this rank's micro-batches weigh 16, loss\(\) says 8"):
        accumulate(plain(), parts_of(*vectors(8), 2), classes_loss, weight=lambda targets: 2 * len(targets))
    with pytest.raises(TypeError, match=r"reducer is a Linear without no_sync\(\)"):
        accumulate(plain(), parts_of(*vectors(8), 2), classes_loss, reducer=nn.Linear(1, 1))


def none_on_the_last_rank():
    parts = parts_of(*vectors(4), 2)
    accumulate(DistributedDataParallel(plain()), parts if dist.get_rank() == 0 else [], classes_loss)


def test_ranks_without_a_micro_batch_are_told_of_on_all_ranks(two):
    with pytest.raises(RankError, match="1 of 2 ranks have no micro-batches") as caught:
        two.run(none_on_the_last_rank)
    assert "all ranks" in str(caught.value)
