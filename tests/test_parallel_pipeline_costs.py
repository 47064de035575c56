"""What a pipeline sends and what it keeps alive: bytes, messages and activations equal the formulas."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.memory import MemoryLedger
from labkit.models import resnet, transformer
from labkit.parallel.pipeline import (
    KNOWN,
    PipelineSchedule,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    split_model,
)
from labkit.ranks import Ranks
from labkit.record import Recorder

WIDTH, LENGTH, ROWS, COUNT = 16, 6, 8, 4


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


def text_model(head="class"):
    torch.manual_seed(0)
    kind = {"num_classes": 5} if head == "class" else {"head": "token", "causal": True}
    return transformer(vocab_size=11, d_model=WIDTH, num_layers=6, num_heads=2, max_len=LENGTH, **kind)


def record_of(model, batch, loss, name, *, chunks=1, count=COUNT, weighted=False, **split):
    """The records of a first step and of a later one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = split_model(model(), size * chunks, **split)
    stages = [parts.stage(index) for index in range(rank, size * chunks, size)]
    made = partial(KNOWN[name], chunks=chunks) if name == "interleaved" else KNOWN[name]
    schedule = PipelineSchedule(stages, made, count, loss, weighted=weighted)
    seen = []
    for _ in range(2):
        with Recorder() as record:
            schedule.step(batch[0], target=batch[1])
        seen.append(record.ranks[0])
    return seen


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_each_boundary_is_crossed_once_forward_and_once_backward_for_each_micro_batch(ranks, name, chunks):
    """Forward the vectors, float32, and one byte a token that says whether it is valid; backward the vectors'
    gradient."""
    tokens = torch.randint(1, 11, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    found = ranks.run(record_of, text_model, (tokens, torch.arange(ROWS) % 5), F.cross_entropy, name, chunks=chunks)
    vectors, flags = 4 * ROWS * LENGTH * WIDTH, ROWS * LENGTH
    size, stages = ranks.world_size, ranks.world_size * chunks
    for rank, records in enumerate(found):
        forward = sum(1 for stage in range(rank, stages, size) if stage < stages - 1 and size > 1)
        backward = sum(1 for stage in range(rank, stages, size) if stage > 0 and size > 1)
        for record in records:
            assert record.bytes_sent == forward * (vectors + flags) + backward * vectors
            assert record.messages == COUNT * (2 * forward + backward)


@pytest.mark.parametrize("rows", [8, 7])
def test_a_resnets_activations_shrink_from_stage_to_stage(two, rows):
    """Cut after the first stage of blocks or the second: half the bytes, since sides halve and channels double."""
    images, sent = torch.randn(rows, 3, 16, 16), {}
    model = partial(resnet, 8, num_classes=5, norm="group")
    for cut in (5, 6):
        found = two.run(record_of, model, (images, torch.arange(rows) % 5), F.cross_entropy, "1f1b", cuts=[cut])
        sent[cut] = [one[1].bytes_sent for one in found]
    assert sent[5] == [4 * rows * 16 * 16 * 16] * 2
    assert sent[6] == [nbytes // 2 for nbytes in sent[5]]


def test_shapes_travel_in_the_first_step_only(two):
    """Later a step has one announcement, and a header for each message."""
    tokens = torch.randint(1, 11, (ROWS, LENGTH))
    found = two.run(record_of, text_model, (tokens, torch.arange(ROWS) % 5), F.cross_entropy, "gpipe")
    first, second = found[0]
    assert second.control_messages == 1 + 2 * COUNT
    assert first.control_messages == second.control_messages + 2
    assert [one.control_messages for one in found[1]] == [COUNT, COUNT]


def test_tied_weights_cost_one_all_reduce_of_their_gradient(ranks):
    """And the weight of all targets one of one number, which the last rank alone knows."""
    if ranks.world_size == 1:
        pytest.skip("there is nobody to share with")
    tokens = torch.randint(1, 11, (ROWS, LENGTH))
    found = ranks.run(record_of, partial(text_model, "token"), (tokens, tokens), tokens_loss, "1f1b", weighted=True)
    last = ranks.world_size - 1
    for rank, (_, record) in enumerate(found):
        spans = [span for span in record.events if span.name == "all_reduce"]
        assert [span.details["bytes"] for span in spans] == ([4 * 11 * WIDTH] if rank in (0, last) else []) + [8]


def tokens_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


# --- memory ---


def peaks(name, count, rows_each):
    """The most bytes of activations of this rank in a step, and what one micro-batch alone keeps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())])
    stage = split_model(model, size, cuts=[2, 4, 6][: size - 1]).stage(rank)
    schedule = PipelineSchedule(stage, KNOWN[name], count, lambda output, target: output.mean())
    x = torch.randn(count * rows_each, 32)
    schedule.step(x, target=x)
    with MemoryLedger(stage.submodule) as ledger:
        schedule.step(x, target=x)
    return ledger.peak.by_kind().get("activations", 0)


@pytest.mark.parametrize(("name", "alive"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("naive", [1, 1, 1, 1])])
def test_activations_alive_are_the_schedules_number_of_micro_batches(name, alive):
    """One micro-batch of 16 rows keeps the linear layer's input and the tanh's output, 2 kB each; the first stage's
    input is the batch itself and counts apart."""
    with Ranks(4) as ranks:
        found = ranks.run(peaks, name, 8, 16)
    each = 16 * 32 * 4
    assert KNOWN[name](4, 8).peak_alive == alive
    assert found == [count * each * (1 if rank == 0 else 2) for rank, count in enumerate(alive)]


def test_a_rank_may_free_the_stages_of_the_others(two):
    def held():
        model = text_model()
        split = split_model(model, 2)
        mine = sum(parameter.numel() for parameter in split.parameters(dist.get_rank()).values())
        split.release([dist.get_rank()])
        return mine, sum(4 * parameter.numel() for parameter in model.parameters())

    whole = sum(parameter.numel() for parameter in text_model().parameters())
    found = two.run(held)
    assert all(nbytes == 4 * mine for mine, nbytes in found) and sum(mine for mine, _ in found) == whole


def test_receive_buffers_are_used_again_when_nobody_holds_them():
    from labkit.parallel.pipeline.buffers import Buffers

    buffers = Buffers(torch.device("cpu"))
    first, other = (buffers.empty((1000, 100), torch.float32) for _ in range(2))
    places = {first.data_ptr(), other.data_ptr()}
    part = first[3:5]
    del first
    assert buffers.empty((1000, 100), torch.float32).data_ptr() not in places
    del part
    assert buffers.empty((500, 100), torch.float64).data_ptr() in places
    assert all(place % 64 == 0 for place in places) and len(places) == 2


class Scales(nn.Module):
    """A large and a small tensor, each times the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x, y):
        return x * self.weight, y * self.weight


def scaled(x, y, name):
    stage = PipelineStage(Scales(), dist.get_rank(), dist.get_world_size(), "cpu")
    schedule = PipelineSchedule(stage, KNOWN[name], 4, lambda output, target: sum(one.mean() for one in output))
    output = schedule.step(x, y, target=x[:, 0])
    return stage.submodule.weight.grad, output


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_large_messages_which_a_thread_begins_and_small_ones_keep_their_order(two, name):
    """600 kB and 24 bytes a micro-batch, in turns in both directions."""
    x, y = torch.randn(8, 75_000), torch.randn(8, 3)
    found = two.run(scaled, x, y, name)
    for grad, _ in found:
        torch.testing.assert_close(grad, 1.5 * (x.mean() + y.mean()).reshape(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1][1], (2.25 * x, 2.25 * y))


# --- as PyTorch's ---


def gradient_beside_torch(ours):
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    module = split_model(text_model(), size).module(rank)
    stage_class = PipelineStage if ours else pipelining.PipelineStage
    stage = stage_class(module, rank, size, torch.device("cpu"))
    schedule_class = Schedule1F1B if ours else pipelining.Schedule1F1B
    schedule = schedule_class(stage, COUNT, F.cross_entropy)
    tokens = torch.randint(1, 11, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    losses = []
    given = (tokens,) if rank == 0 else ()
    wanted = {"target": torch.arange(ROWS) % 5, "losses": losses} if rank == size - 1 else {}
    output = schedule.step(*given, **wanted)
    return output, losses, [parameter.grad for parameter in module.parameters()]


def test_two_lines_change_and_pytorchs_pipeline_gives_the_same(two):
    for ours, theirs in zip(two.run(gradient_beside_torch, True), two.run(gradient_beside_torch, False), strict=True):
        torch.testing.assert_close(ours, theirs)


# --- failure ---


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("the third micro-batch is one too many")
        return self.layer(x)


def run_with(module=None, *, step=True, count=4, target=True, batch=True, loss=F.mse_loss, **options):
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(module or nn.Linear(3, 3), rank, size, "cpu")
    schedule = ScheduleGPipe(stage, count, loss, **options)
    x = torch.randn(8, 3)
    return (schedule.step if step else schedule.eval)(*([x] if batch else []), target=x if target else None)


@pytest.mark.parametrize("where", [0, 1])
def test_an_exception_in_one_stage_ends_all_with_its_cause(two, where):
    from labkit.ranks import RankError

    def failing(where):
        return run_with(Fails() if dist.get_rank() == where else None)

    with pytest.raises(RankError, match=f"rank {where} raised ZeroDivisionError: the third micro-batch") as caught:
        two.run(failing, where)
    assert f"forward of micro-batch 2 on stage {where}" in caught.value.details
    assert two.run(run_with)[1].shape == (8, 3)  # and the ranks can go on


def test_a_pipeline_is_not_used_again_after_an_exception_in_it(two):
    """It would wait for messages that nobody sends."""
    from labkit.ranks import RankError

    def catching():
        stage = PipelineStage(Fails() if dist.get_rank() else nn.Linear(3, 3), dist.get_rank(), 2, "cpu")
        schedule, x = ScheduleGPipe(stage, 4, F.mse_loss), torch.randn(8, 3)
        if dist.get_rank():
            with pytest.raises(ZeroDivisionError):
                schedule.step(x, target=x)
        schedule.step(x, target=x)

    with pytest.raises(
        RankError, match="rank 1 raised RuntimeError: pipeline: a call before this one ended in ZeroDiv"
    ):
        two.run(catching)


def test_a_schedule_that_outlives_its_ranks_is_refused(two):
    from labkit.ranks import RankError

    two.run_cell("""
import torch
from labkit.parallel import PipelineStage, ScheduleGPipe
stage = PipelineStage(torch.nn.Linear(2, 2), rank, 2, "cpu")
schedule, x = ScheduleGPipe(stage, 2, torch.nn.functional.mse_loss), torch.ones(4, 2)
schedule.step(x, target=x)
""")
    with pytest.raises(RankError, match="ZeroDivisionError"):
        two.run_cell("if rank == 0: 1 / 0\nschedule.step(x, target=x)")
    with pytest.raises(RankError, match="built before the ranks were restarted: build it, and what uses it, again"):
        two.run_cell("schedule.step(x, target=x)")


def other_calls(which):
    first = dist.get_rank() == 0
    if which == "eval":
        return run_with(step=first)
    if which == "count":
        return run_with(count=4 if first else 2)
    if which == "no batch":
        return run_with(batch=False)
    if which == "no target":
        return run_with(target=False)
    if which == "sum":
        return run_with(loss=lambda output, target: (F.mse_loss(output, target), 1))
    if which == "many":
        return run_with(loss=lambda output, target: output)
    if which == "no graph":
        return run_with(loss=lambda output, target: F.mse_loss(output, target).detach())
    if which in WEIGHTS:
        return run_with(loss=lambda output, target: (output.sum(), WEIGHTS[which]), weighted=True)
    if which == "in place":
        return run_with(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)))
    if which == "cuts":
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        stage, x = split_model(model, 2, cuts=[1 if first else 2]).stage(dist.get_rank()), torch.randn(4, 3)
        return ScheduleGPipe(stage, 2, F.mse_loss).step(x, target=x)
    if which in ("name", "returns none", "no stages"):
        stages = [] if which == "no stages" else PipelineStage(nn.Linear(3, 3), dist.get_rank(), 2, "cpu")
        return PipelineSchedule(stages, "gpipe" if which == "name" else lambda ranks, count: None, 4, F.mse_loss)
    if which == "stage":
        return PipelineStage(nn.Linear(3, 3), 0, 2, "cpu")
    if which == "stages":
        return PipelineStage(nn.Linear(3, 3), dist.get_rank(), 3, "cpu")
    if which == "text":
        return run_with(Says())
    if which == "too few":
        stage = PipelineStage(nn.Linear(3, 3), dist.get_rank(), 2, "cpu")
        x = torch.randn(3, 3)
        return PipelineSchedule(stage, KNOWN["gpipe"](2, 4), loss_fn=F.mse_loss).step(x, target=x)
    if which == "rows":
        stage = PipelineStage(nn.Linear(3, 3), dist.get_rank(), 2, "cpu")
        return ScheduleGPipe(stage, 2, F.mse_loss).step(torch.randn(4, 3), target=torch.randn(5, 3))
    stage = PipelineStage(nn.Linear(3, 3), dist.get_rank(), 2, "cpu")
    return ScheduleInterleaved1F1B([stage], 4, args_chunk_spec=1)


class Says(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)

    def forward(self, x):
        return super().forward(x), "text"


WEIGHTS = {"weight below 0": -1, "weight is text": "2", "weight of 0": 0}


@pytest.mark.parametrize(
    ("which", "sentence"),
    [
        ("no graph", "rank 1 raised RuntimeError: pipeline: what loss_fn returns does not depend on the output"),
        (
            "weight below 0",
            "rank 1 raised ValueError: pipeline: the weight that loss_fn returns is -1: give the number",
        ),
        ("weight is text", "the weight that loss_fn returns is a str: give the number"),
        ("weight of 0", "all ranks raised ValueError: pipeline: the weights of all micro-batches are 0, so that"),
        ("in place", "pipeline: stage 1 changes in place what it was given, .* inplace=False"),
        ("cuts", "rank 1 has cut the model elsewhere than rank 0, .* give all ranks the same cuts"),
        ("name", "schedule is 'gpipe'; give a Schedule, as Schedule.of"),
        ("returns none", "the function that makes the schedule returned a NoneType: return a Schedule"),
        ("no stages", r"stages is \[\]; give this rank's PipelineStage"),
        ("eval", "rank 1 calls eval while rank 0 calls step"),
        ("count", "rank 1 has another schedule or number of micro-batches than rank 0"),
        ("no batch", "rank 0 raised ValueError: pipeline: the rank of the first stage needs the batch"),
        ("no target", "last stage needs the target"),
        ("sum", "give weighted=True"),
        ("many", "must return one number"),
        ("stage", "stage 0 belongs to rank 0 of the pipeline, not to rank 1"),
        ("stages", "num_stages is 3, but the pipeline has 2 ranks"),
        ("text", "stage 0 returns a str as output 1; between stages only tensors travel"),
        ("too few", "a batch of 3 rows can't be cut into 4 micro-batches"),
        ("rows", "the target has 5 rows, but the batch has 4"),
        ("spec", "args_chunk_spec is not supported"),
    ],
)
def test_what_a_user_gets_wrong_ends_in_a_sentence(two, which, sentence):
    from labkit.ranks import RankError

    with pytest.raises(RankError, match=sentence) as caught:
        two.run(other_calls, which)
    assert "\n" not in str(caught.value)
