"""SyncBatchNorm on shares of a batch is BatchNorm on the whole batch: forward, backward, running statistics."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.collectives.formulas import all_reduce_sent
from labkit.parallel.synchronised_norm import SyncBatchNorm
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder

SHAPES = {"vectors": (9, 4), "sequences": (7, 4, 5), "images": (8, 4, 3, 3), "volumes": (5, 4, 2, 2, 2)}
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param, timeout=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout=20) as ranks:
        yield ranks


def share_sizes(kind, rows, size):
    """How many rows each rank has."""
    even = [rows // size + (rank < rows % size) for rank in range(size)]
    if kind == "even" or size == 1:
        return even
    if kind == "uneven":
        return [rows - (size - 1), *[1] * (size - 1)]
    return [0, rows - (size - 2), *[1] * (size - 2)]  # the first has none


def draw(shape, dtype):
    """Inputs [B, C, ...] far from mean 0 and deviation 1, and what backward is given."""
    random = torch.Generator().manual_seed(3)
    inputs = 5 + 3 * torch.randn(shape, generator=random, dtype=torch.float64)
    return inputs.to(dtype), torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)


def trained(norm, rows, shape, dtype, options, steps=2):
    """Output, gradients and statistics after two steps on some rows of the batch."""
    torch.manual_seed(0)
    module = norm(shape[1], **options).to(dtype)
    if options.get("affine", True):
        nn.init.uniform_(module.weight)
        nn.init.uniform_(module.bias)
    inputs, gradient = draw(shape, dtype)
    inputs = inputs[rows].requires_grad_()
    for step in range(steps):
        output = module(inputs * (1 + step))
        output.backward(gradient[rows])
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return output.detach(), inputs.grad, grads, module.state_dict()


def on_rank(kind, shape, dtype, options):
    sizes = share_sizes(kind, shape[0], dist.get_world_size())
    begin = sum(sizes[: dist.get_rank()])
    return trained(SyncBatchNorm, slice(begin, begin + sizes[dist.get_rank()]), shape, dtype, options)


def equal_to_the_whole(ranks, kind, shape, options, dtype=torch.float64, rtol=1e-10):
    parts = ranks.run(on_rank, kind, shape, dtype, options)
    output, gradient, grads, state = trained(NORMS[len(shape)], slice(None), shape, dtype, options)

    def close(ours, truth):
        torch.testing.assert_close(ours, truth, rtol=rtol, atol=rtol)

    close(torch.cat([part[0] for part in parts]), output)
    close(torch.cat([part[1] for part in parts]), gradient)
    for name, value in grads.items():
        # each rank's is of its own share: data parallel adds them up
        close(sum(part[2][name] for part in parts), value)
    for part in parts:
        for name, value in state.items():
            close(part[3][name], value)


@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shares_give_what_the_whole_batch_gives(ranks, kind, shape):
    equal_to_the_whole(ranks, kind, shape, {})


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.4, "eps": 0.1}],
    ids=str,
)
def test_with_every_option(two, options):
    equal_to_the_whole(two, "uneven", SHAPES["images"], options)


def test_in_float32(two):
    equal_to_the_whole(two, "uneven", SHAPES["images"], {}, torch.float32, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_inputs_have_statistics_of_more_bits(two, dtype):
    """70,000 values a channel around 100: float16 could count neither them nor their squares."""

    def run():
        torch.manual_seed(dist.get_rank())
        module = SyncBatchNorm(2)
        inputs = (100 + torch.randn(35, 2, 1000, dtype=torch.float64)).to(dtype).requires_grad_()
        output = module(inputs)
        output.sum().backward()
        return output.dtype == inputs.grad.dtype == dtype, module.running_mean.tolist(), output.float().std().item()

    for same, mean, deviation in two.run(run):
        assert same and mean == pytest.approx([10.0, 10.0], abs=0.01)
        assert deviation == pytest.approx(1.0, abs=0.1)


def test_in_eval_mode_it_is_batch_norm_and_sends_nothing(two):
    def run():
        module = SyncBatchNorm(4).eval()
        inputs, _ = draw(SHAPES["images"], torch.float32)
        with Recorder() as record:
            same = torch.equal(module(inputs), nn.BatchNorm2d(4).eval()(inputs))
        return same, record.messages

    assert two.run(run) == [(True, 0)] * 2


def test_it_costs_one_collective_each_way(ranks):
    size = ranks.world_size

    def run():
        module = SyncBatchNorm(6)
        with Recorder() as forward:
            output = module(torch.randn(3, 6, requires_grad=True))
        with Recorder() as backward:
            output.sum().backward()
        return [(one.bytes_by("operation"), one.messages) for one in (forward, backward)]

    for rank, ((gathered, messages), (reduced, more)) in enumerate(ranks.run(run)):
        assert gathered.get("all_gather_into_tensor", 0) == (size - 1) * (2 * 6 + 1) * 8
        formula = all_reduce_sent("ring", 12, 8, size)
        assert reduced.get("all_reduce", 0) == formula.bytes[rank]
        assert (messages, more) == (size - 1, formula.messages[rank])


def test_a_module_is_converted_with_its_values(two):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ModuleDict({"norm": nn.BatchNorm2d(4, eps=0.2)}), nn.GroupNorm(2, 4))
    module.eval()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    old = module[1]["norm"]
    assert SyncBatchNorm.convert_sync_batchnorm(module) is module
    new = module[1]["norm"]
    assert isinstance(new, SyncBatchNorm) and isinstance(module[2], nn.GroupNorm)
    assert new.weight is old.weight and new.running_var is old.running_var and new.eps == 0.2 and not new.training
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(3)), SyncBatchNorm)


def test_outside_of_ranks_it_is_batch_norm():
    ours = trained(SyncBatchNorm, slice(None), SHAPES["images"], torch.float64, {})
    truth = trained(nn.BatchNorm2d, slice(None), SHAPES["images"], torch.float64, {})
    torch.testing.assert_close(ours, truth)


def test_a_group_of_some_ranks(two):
    def run():
        groups = [dist.new_group([rank]) for rank in range(2)]
        module = SyncBatchNorm(1, process_group=groups[dist.get_rank()])
        module(torch.tensor([[0.0], [2.0]]) + 10 * dist.get_rank())
        return module.running_mean.item()

    assert two.run(run) == [pytest.approx(0.1), pytest.approx(1.1)]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3,), "the input is \\[3\\]; give \\[B, 4, ...\\], its channels in dim 1"),
        ((3, 5), "the input is \\[3, 5\\]; give \\[B, 4, ...\\]"),
        ((1, 4), "1 value a channel over all ranks has no variance; give 2 or more"),
    ],
)
def test_what_it_cant_normalise_is_refused(two, shape, words):
    def run():
        SyncBatchNorm(4)(
            torch.zeros(shape) if dist.get_rank() == 0 or len(shape) < 2 or shape[1] != 4 else torch.zeros(0, 4)
        )

    with pytest.raises(RankError, match=words):
        two.run(run)


def test_a_second_derivative_is_refused(two):
    def run():
        inputs = torch.randn(3, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(SyncBatchNorm(2)(inputs).square().sum(), inputs, create_graph=True)
        gradient.sum().backward()

    with pytest.raises(RankError, match="differentiate twice"):
        two.run(run)
