"""Training in a pipeline is training in one process: on every awkward model, with every schedule, at 1 to 4 stages."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipelines import WAYS, Pipelined, gathered
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from labkit.parallel.pipeline import Schedule
from labkit.ranks import Ranks
from labkit.verify import CASES, NotEquivalentError, assert_equivalent

sgd = partial(torch.optim.SGD, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)
WHOLE = [name for name, case in CASES.items() if case.reference == "whole"]


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


def equivalent(ranks, case, optimizer=sgd, dtype=torch.float64, **options):
    chosen, harness = CASES[case], {}
    for name in ("reference", "steps", "shares", "micro_batches", "batch"):
        if name in options:
            harness[name] = options.pop(name)
    if "micro_batches" in harness:
        options["micro_batches"] = harness["micro_batches"]
        if harness.get("reference") != "replay":
            del harness["micro_batches"]
    batch = harness.pop("batch", None) or chosen.batch()
    return assert_equivalent(
        chosen.build, batch, chosen.loss, partial(Pipelined, **options), ranks.world_size, optimizer,
        dtype=dtype, ranks=ranks, **harness,
    )  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_gradients_and_weights_equal_one_process(ranks, case):
    """Each model under a schedule of its own, so that all of them have their turn at each number of ranks."""
    way = list(WAYS)[(WHOLE.index(case) + ranks.world_size) % len(WAYS)]
    assert equivalent(ranks, case, schedule=way, dtype=torch.float32).identical
    assert equivalent(ranks, case, schedule=way, optimizer=adamw).identical


@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_trains_the_causal_transformer(ranks, way):
    equivalent(ranks, "tokens", schedule=way)


@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_trains_the_residual_network(three, way):
    equivalent(three, "image", schedule=way)


@pytest.mark.parametrize("case", ["image", "tokens"])
def test_fifty_steps_stay_together(two, case):
    assert equivalent(two, case, steps=50, micro_batches=2).errors["weights"] < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_that_do_not_divide_the_batch_are_weighted_rightly(three, way):
    """7 rows in 4, with other numbers of valid tokens in each row."""
    inputs, targets = CASES["tokens"].batch()
    equivalent(three, "tokens", schedule=way, batch=(inputs[:7], targets[:7]), micro_batches=4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2])
def test_there_may_be_fewer_micro_batches_than_stages(three, way, count):
    equivalent(three, "plain", schedule=way, micro_batches=count)


def test_a_batch_with_fewer_rows_than_micro_batches_makes_fewer_of_them(three):
    inputs, targets = CASES["plain"].batch()
    equivalent(three, "plain", batch=(inputs[:2], targets[:2]), micro_batches=4)


def test_popular_code_is_too_large_by_the_number_of_micro_batches(two):
    """The tests above can fail: undivided means add up, and the harness says by how much they are too large."""
    with pytest.raises(NotEquivalentError, match="4 times"):
        equivalent(two, "plain", scale_grads=False, loss_form="mean")
    equivalent(two, "plain", loss_form="mean")


def test_means_of_unequal_micro_batches_count_by_their_rows(two):
    equivalent(two, "uneven", loss_form="mean", micro_batches=4)  # 5 rows: 2, 1, 1, 1


def test_a_schedule_of_ones_own_trains_rightly(two):
    own = Schedule.of(["F0 F1 F2 B1 B0 F3 B3 B2", "F1 F0 B1 F2 B0 F3 I3 B2 W3"])
    equivalent(two, "tokens", schedule=own)


def test_the_weight_of_the_batch_may_be_given_beforehand(two):
    """Then nothing is divided at the end."""
    equivalent(two, "tokens", known_weight=valid_tokens)


def valid_tokens(targets):
    return (targets != -100).sum()


# --- dropout and BatchNorm ---


@pytest.mark.parametrize("way", ["gpipe", "1f1b", "interleaved"])
def test_batch_norm_is_the_replay_of_the_micro_batches_in_one_process(ranks, way):
    """Each micro-batch has its own statistics; running ones are updated once for each. Only the first share has rows:
    in a pipeline all ranks work on one batch."""
    shares = [8] + [0] * (ranks.world_size - 1)
    equivalent(ranks, "batch norm", schedule=way, reference="replay", shares=shares, micro_batches=4)


def test_deferred_statistics_are_those_of_the_whole_batch(two):
    """GPipe's rule. The first BatchNorm sees the same as in one process, whatever the number of micro-batches."""
    x, y = CASES["batch norm"].batch()

    def statistics(count):
        torch.manual_seed(0)
        model = CASES["batch norm"].build().double()
        way = partial(Pipelined, micro_batches=count, deferred_batch_norm=True, schedule="gpipe")
        pipeline = way(model, CASES["batch norm"].loss, sgd)
        pipeline.step(x.double(), y)
        return pipeline.full_buffers()

    torch.manual_seed(0)
    model = CASES["batch norm"].build().double()
    model(x.double())
    for count in (1, 3, 4):
        found = two.run(statistics, count)[0]
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(found[name], buffer, rtol=0, atol=1e-12)


def with_dropout():
    from labkit.models import transformer

    return transformer(
        vocab_size=11, d_model=16, num_layers=2, num_heads=2, max_len=6, causal=True, head="token", dropout=0.3
    ).double()


def gradients_in_a_pipeline(inputs, targets, schedule, checkpoint=None):
    torch.manual_seed(0)
    pipeline = Pipelined(with_dropout(), CASES["tokens"].loss, sgd, schedule=schedule, checkpoint=checkpoint)
    torch.manual_seed(100 + dist.get_rank())
    pipeline.step(inputs, targets)
    return gathered(pipeline.named, grads=True)


def replayed_gradients(inputs, targets, stages):
    """One process, stage by stage, each with its rank's random numbers, which go on from micro-batch to micro-batch."""
    from labkit.parallel.pipeline import split_model

    torch.manual_seed(0)
    model = with_dropout()
    split, values = split_model(model, stages), [(part,) for part in inputs.split(2)]
    for stage in range(stages):
        torch.manual_seed(100 + stage)
        outputs = [split.module(stage)(*value) for value in values]
        values = [output if isinstance(output, tuple) else (output,) for output in outputs]
    pairs = [CASES["tokens"].loss(value[0], part) for value, part in zip(values, targets.split(2), strict=True)]
    (sum(loss for loss, _ in pairs) / sum(weight for _, weight in pairs)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", [None, "recompute"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_each_stage_draws_its_dropout_masks_in_the_order_of_its_micro_batches(three, schedule, kind):
    """Whatever the schedule, and with checkpointing, whose second forward has the masks of the first."""
    inputs, targets = CASES["tokens"].batch()
    recompute = partial(torchs_checkpoint, use_reentrant=False) if kind else None
    found = three.run(gradients_in_a_pipeline, inputs, targets, schedule, recompute)[0]
    for name, grad in replayed_gradients(inputs, targets, 3).items():
        torch.testing.assert_close(found[name].grad, grad, rtol=0, atol=1e-12)


# --- checkpointing, several inputs and outputs, evaluation ---


def test_checkpointing_inside_stages_changes_no_gradient(two):
    equivalent(two, "image", schedule="1f1b", checkpoint=partial(torchs_checkpoint, use_reentrant=False))


class Two(nn.Module):
    """Takes two tensors and gives back three, one of them whole numbers, one untouched."""

    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y, *more, factor=None):
        x = torch.tanh(self.first(x)) + self.other(y)
        return x if factor is None else x * factor, y, torch.arange(len(x))


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x, y, numbers):
        return {"logits": self.last(torch.cat([x, y], 1)), "numbers": numbers}


def stages_of_several(count=3):
    torch.manual_seed(1)
    return [*[Two() for _ in range(count - 1)], Join()]


def entropy(output, target):
    return F.cross_entropy(output["logits"], target)


def several(x, y, target, factor, *, evaluate=False):
    from labkit.parallel.pipeline import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    module = stages_of_several(size)[rank]
    schedule = Schedule1F1B(PipelineStage(module, rank, size, "cpu"), 4, entropy)
    call = schedule.eval if evaluate else schedule.step
    options = {"factor": factor} if rank < size - 1 else {}
    losses = []
    output = call(*([x, y] if rank == 0 else []), target=target if rank == size - 1 else None, losses=losses, **options)
    return output, losses, [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("evaluate", [False, True])
def test_stages_may_have_several_inputs_and_outputs_and_keyword_arguments(three, evaluate):
    torch.manual_seed(2)
    x, y, factor = torch.randn(7, 4), torch.randn(7, 4), torch.randn(7, 1)
    target = torch.arange(7) % 3
    found = three.run(several, x, y, target, factor, evaluate=evaluate)
    values = x, y
    for stage in stages_of_several()[:-1]:
        values = stage(*values, factor=factor)
    modules = stages_of_several()
    values = x, y
    for module in modules[:-1]:
        values = module(*values, factor=factor)
    loss = entropy(modules[-1](*values), target)
    output, losses, _ = found[2]
    torch.testing.assert_close(output["logits"], modules[-1](*values)["logits"])
    assert output["numbers"].tolist() == [0, 1, 0, 1, 0, 1, 0] and found[0][0] is None
    rows = torch.tensor([2, 2, 2, 1])
    torch.testing.assert_close((torch.stack(losses) * rows).sum() / 7, loss)
    if evaluate:
        assert all(grad is None for one in found for grad in one[2])
        return
    loss.backward()
    for module, (_, _, grads) in zip(modules, found, strict=True):
        for parameter, grad in zip(module.parameters(), grads, strict=True):
            torch.testing.assert_close(grad, parameter.grad)
