"""What can be made a unit of stage 3, what happens in its backward, and what is said where something is wrong."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from zero_ways import adamw, full_grads, full_params, shard, wide

from labkit.memory import checkpoint
from labkit.mesh import clip_grad_norm_, init_device_mesh, placements_of
from labkit.parallel import DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard
from labkit.parallel.zero import full_state, offload_optimizer_state
from labkit.parallel.zero.offload import is_offloaded
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder
from labkit.verify.awkward import Tied, frozen, plain


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with Ranks(4, timeout=30) as ranks:
        yield ranks


def refused(ranks, words, function, *arguments):
    with pytest.raises(RankError, match=words) as caught:
        ranks.run(function, *arguments)
    assert "\n" not in str(caught.value.exception)


def seeded(build, *arguments, **options):
    torch.manual_seed(0)
    return build(*arguments, **options)


def rows(width, count=3):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(dist.get_rank()))


def averaged(module, inputs):
    """The mean gradient over the ranks, by data parallel."""
    wrapper = DistributedDataParallel(copy.deepcopy(module))
    wrapper(inputs).square().sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in wrapper.module.named_parameters()}


def same(mine, other):
    return mine.keys() == other.keys() and all(
        (mine[name] is None) is (other[name] is None) and (mine[name] is None or torch.equal(mine[name], other[name]))
        for name in other
    )


# --- in backward ---


class Checkpointed(nn.Module):
    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x):
        return self.how(self.inner, x)


HOWS = {
    "labkit, hooks": partial(checkpoint, use_reentrant=False),
    "labkit, reentrant": partial(checkpoint, use_reentrant=True),
    "torch": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "torch, reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("unit", ["around", "inside"])
def test_units_are_checkpointed_inside_and_outside(two, how, unit):
    """The unit lies around the checkpoint, or inside of it, where a recomputation calls it once more."""

    def run():
        layers = [seeded(nn.Linear, 5, 5) for _ in range(3)]
        module = nn.Sequential(nn.Linear(5, 5), *[Checkpointed(layer, HOWS[how]) for layer in layers])
        expected = averaged(module, rows(5))
        for one in module[1:]:
            fully_shard(one if unit == "around" else one.inner)
        fully_shard(module)
        for _ in range(2):
            module.zero_grad()
            module(rows(5)).square().sum().backward()
        return same(full_grads(module), expected), [u.gathered_bytes for u in module.sharded_units]

    assert two.run(run) == [(True, [0] * 4)] * 2


def test_two_forwards_before_their_backwards(two):
    def run(**options):
        module = seeded(wide, 8, 2)
        plain = copy.deepcopy(module)
        shard(module, **options)
        first, second = module(rows(8)), module(2 * rows(8))
        first.square().sum().backward()
        second.square().sum().backward()
        one = averaged(plain, rows(8))
        two = averaged(plain, 2 * rows(8))
        return max((grad - one[name] - two[name]).abs().max().item() for name, grad in full_grads(module).items())

    assert max(two.run(run)) < 1e-5
    assert max(two.run(run, reshard_after_forward=False)) < 1e-5


def test_a_backward_that_fails_leaves_no_trace(two):
    def run():
        module = seeded(wide, 8, 3)
        expected = averaged(module, rows(8))
        shard(module)
        output = module(rows(8))
        output.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.square().sum().backward()
        module.zero_grad()
        module(rows(8)).square().sum().backward()
        return same(full_grads(module), expected)

    assert two.run(run) == [True, True]


def test_stepping_between_a_forward_and_its_backward_is_noticed(two):
    def run():
        module = shard(wide(8, 2))
        output = module(rows(8))
        with torch.no_grad():
            next(module.parameters()).add_(1)
        output.sum().backward()

    refused(two, "were changed between a forward and its backward", run)


# --- awkward parameters ---


def test_tied_and_frozen_parameters_are_held_once(two):
    def run(build, inputs):
        module = seeded(build)
        expected, whole = averaged(module, inputs), copy.deepcopy(module.state_dict())
        count = sum(p.numel() for p in module.parameters())
        fully_shard(module)
        module(inputs).square().sum().backward()
        own = sum(p.numel() for p in module.parameters())
        return same(full_grads(module), expected), same(full_state(module), whole), own, count

    for build, inputs in ((Tied, torch.arange(6).view(2, 3)), (frozen, torch.ones(2, 6))):
        (right, back, own, count), (_, _, other, _) = two.run(run, build, inputs)
        assert right and back and own + other == count
        assert abs(own - count / 2) < 40  # gaps between parameters of odd sizes lie on one side


def test_a_frozen_unit_passes_gradients_on_and_is_freed(two):
    def run():
        module = seeded(wide, 8, 3)
        for parameter in module[1].parameters():
            parameter.requires_grad_(False)
        expected = averaged(module, rows(8))
        shard(module)
        module(rows(8)).square().sum().backward()
        with Recorder() as record:
            module.zero_grad()
            module(rows(8)).square().sum().backward()
        reduced = record.bytes_by("operation")["reduce_scatter_tensor"]
        return same(full_grads(module), expected), reduced, [unit.gathered_bytes for unit in module.sharded_units]

    assert two.run(run) == [(True, 2 * 4 * 72 // 2, [0, 0, 0])] * 2


def test_a_parameter_that_nobody_uses_is_named_or_left_alone(two):
    def run(**options):
        module = nn.ModuleDict({"used": nn.Linear(4, 4), "never": nn.Linear(4, 4)})
        module.forward = lambda x: module["used"](x)
        fully_shard(module, **options)
        optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.5)
        before = full_params(module)
        module(rows(4)).sum().backward()
        optimizer.step()
        return [name for name, value in full_params(module).items() if torch.equal(value, before[name])]

    assert two.run(run, find_unused_parameters=True) == [["never.weight", "never.bias"]] * 2
    refused(two, "computed no gradient for never.weight, never.bias: use them in every forward", run)


def test_16_bits_are_gathered_from_float32_shards(two):
    def run():
        module = seeded(wide, 64, 2)
        whole = copy.deepcopy(module)
        shard(module, param_dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with Recorder() as record:
            output = module(rows(64))
            output.float().square().sum().backward()
        expected = averaged(whole.bfloat16(), rows(64).bfloat16())
        grads = full_grads(module)
        near = all(torch.allclose(grads[name], value.float(), rtol=0.1, atol=0.5) for name, value in expected.items())
        optimizer.step()
        kinds = {p.dtype for p in module.parameters()} | {p.grad.dtype for p in module.parameters()}
        return near, output.dtype, kinds, record.bytes_sent

    elements = 2 * (64 * 64 + 64)
    assert two.run(run) == [(True, torch.bfloat16, {torch.float32}, 3 * 2 * elements // 2)] * 2


def test_clipping_sees_one_norm_whatever_is_sharded(two):
    def run(stage):
        module = seeded(plain)
        exact = averaged(module, rows(6))
        norm = torch.cat([grad.flatten() for grad in exact.values()]).double().norm()
        if stage == 3:
            shard(module)
        else:
            module.optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, stage=stage, lr=0.1)
        module(rows(6)).square().sum().backward()
        found = clip_grad_norm_(module.parameters(), 0.5)
        after = torch.cat([grad.flatten() for grad in full_grads(module).values()]).norm()
        return abs(found / norm - 1).item() < 1e-6, abs(after.item() - 0.5) < 1e-4

    for stage in (1, 2, 3):
        assert two.run(run, stage) == [(True, True)] * 2


# --- where things are ---


def test_every_shard_has_a_placement_and_each_element_one_holder(two):
    def run():
        module = seeded(plain)
        whole = dict(copy.deepcopy(module).named_parameters())
        shard(module)
        pieces = {name: (place, module.get_parameter(name).detach()) for name, place in placements_of(module).items()}
        return {name: (p.flat, p.sharded_over[0].size) for name, (p, _) in pieces.items()}, all(
            torch.equal(p.take(whole[name]), piece) for name, (p, piece) in pieces.items()
        )

    (first, right), (second, also) = two.run(run)
    assert right and also
    for name, ((start, stop), size) in first.items():
        assert size == 2 and {(start, stop), second[name][0]} and second[name][0][0] in (stop, 0, stop)


def test_hybrid_sharding_gathers_within_nodes_and_sums_between_them(four):
    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
        module = seeded(wide, 16, 3)
        expected = averaged(module, rows(16))
        shard(module, mesh=mesh)
        with Recorder() as record:
            module(rows(16)).square().sum().backward()
        grads = full_grads(module)
        near = all(torch.allclose(grads[name], value, atol=1e-5) for name, value in expected.items())
        placement = next(iter(placements_of(module).values()))
        axes = [axis.name for axis in (*placement.sharded_over, *placement.replicated_over)]
        return near, axes, record.bytes_by("group")

    elements = 3 * (16 * 16 + 16)
    for near, axes, by in four.run(run):
        assert near and axes == ["inside", "between"]
        # inside: 3 P (n - 1) / n; between: an all-reduce of the shard
        assert by == {"inside": 3 * 4 * elements // 2, "between": 4 * elements // 2}


def test_a_model_on_the_meta_device_gets_values_unit_by_unit(two):
    def run(initialise):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        torch.manual_seed(dist.get_rank())
        shard(module, initialise=initialise)
        module(rows(6)).square().sum().backward()
        state = full_state(module)
        return (
            not any(value.is_meta for value in state.values()),
            float(state["0.weight"].std()),
            state["1.running_var"],
        )

    def zeros(module):
        for parameter in module.parameters():
            nn.init.zeros_(parameter)

    (whole, spread, variance), (_, other, _) = two.run(run, None)
    assert whole and spread == other > 0.1 and torch.isfinite(variance).all()


def test_a_meta_parameter_that_nobody_can_initialise_is_named(two):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3, device="meta"))

    refused(two, "scale is on the meta device, and Bare has no reset_parameters", lambda: fully_shard(Bare()))


def test_offloaded_state_lies_in_files_and_trains_the_same(two, tmp_path):
    def run(stage, offload):
        module = seeded(wide, 32, 2)
        folder = tmp_path / f"{stage}-{dist.get_rank()}"
        if stage == 3:
            shard(module)
            optimizer = adamw(module.parameters())
            if offload:
                offload_optimizer_state(optimizer, folder)
        else:
            optimizer = ZeroRedundancyOptimizer(
                module.parameters(), torch.optim.AdamW, lr=0.01, stage=stage, offload=folder if offload else None
            )
        for _ in range(3):
            optimizer.zero_grad()
            module(rows(32)).square().sum().backward()
            optimizer.step()
        moments = [v for state in optimizer.state.values() for v in state.values() if v.dim() and v.numel()]
        assert all(is_offloaded(moment) is offload for moment in moments)
        if offload:
            on_disk = sum(file.stat().st_size for file in folder.iterdir())
            assert on_disk == sum(4 * moment.numel() for moment in moments)
        return full_params(module)

    for stage in (1, 3):
        for one, other in zip(two.run(run, stage, False), two.run(run, stage, True), strict=True):
            assert same(one, other)


# --- evaluation, and what is wrong ---


def test_evaluation_gathers_and_frees(two):
    def run(**options):
        module = seeded(wide, 8, 3)
        expected = module(rows(8)).detach()
        shard(module, **options)
        module.eval()
        with torch.no_grad():
            output = module(rows(8))
        return torch.equal(output, expected), [unit.gathered_bytes for unit in module.sharded_units]

    assert two.run(run) == two.run(run, reshard_after_forward=False) == [(True, [0, 0, 0])] * 2


def ddp_then_zero():
    module = nn.Linear(2, 2)
    keep = DistributedDataParallel(module)
    ZeroRedundancyOptimizer(keep.parameters(), torch.optim.SGD, lr=1.0)


def zero_then_ddp():
    module = nn.Linear(2, 2)
    keep = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
    DistributedDataParallel(module)
    keep.step()


def ddp_then_shard():
    module = nn.Linear(2, 2)
    keep = DistributedDataParallel(module)
    fully_shard(keep.module)


def tie_between_units():
    module = Tied()
    fully_shard(module.embedding)
    fully_shard(module)


def twice():
    fully_shard(fully_shard(nn.Linear(2, 2)))


def converted():
    module = nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
    module.double()
    module(torch.ones(1, 2).double()).sum().backward()
    optimizer.step()


def unused():
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
    module[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()


WRONG = {
    ddp_then_zero: "reduced by a DistributedDataParallel or another ZeroRedundancyOptimizer already",
    zero_then_ddp: "is wrapped already",
    ddp_then_shard: "parameter weight is reduced by a DistributedDataParallel",
    tie_between_units: "head.weight is tied to one that is in another unit",
    twice: "is a unit already",
    converted: "was converted to torch.float64 after",
    unused: r"computed no gradient for parameter 2 \(of shape \[2, 2\]\), parameter 3",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_what_is_wrong_ends_in_a_sentence(two, wrong):
    refused(two, WRONG[wrong], wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 3}, "give 1 or 2; stage 3 is"),
        ({"bucket_cap_mb": 0}, "megabytes above 0"),
        ({"algorithm": "x"}, "not known"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(two, options, words):
    def run():
        ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=1.0, **options)

    refused(two, words, run)


def test_parameter_groups_keep_their_settings(two):
    """And a learning rate that is changed later is used: two groups, in one bucket."""

    def run(zero):
        module = seeded(plain)
        groups = [
            {"params": [module[0].weight, module[4].bias], "lr": 0.1},
            {"params": [module[0].bias, module[2].weight, module[2].bias, module[4].weight], "weight_decay": 0.3},
        ]
        if zero:
            optimizer, network = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01), module
        else:
            network, optimizer = DistributedDataParallel(module), torch.optim.AdamW(groups, lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            F.mse_loss(network(rows(6)), torch.ones(3, 5)).backward()
            optimizer.param_groups[1]["lr"] = 0.02 * (step + 1)
            optimizer.step()
        return {name: value.detach() for name, value in module.named_parameters()}

    for one, other in zip(two.run(run, True), two.run(run, False), strict=True):
        assert same(one, other)
