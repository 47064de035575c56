"""After an error, a batch that was given up, or a saved state, training goes on with the right numbers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zero_ways import full_grads, full_params, shard, wide

from labkit.collectives import all_reduce
from labkit.parallel import ZeroRedundancyOptimizer, fully_shard
from labkit.ranks import RankError, Ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout=20) as ranks:
        yield ranks


def rows(seed=0, width=8):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(dist.get_rank() + 10 * seed))


def seeded(build, *arguments):
    torch.manual_seed(0)
    return build(*arguments)


def averaged(module, *calls):
    """The mean over the ranks of the gradients that these calls' outputs, squared, add up to."""
    module = copy.deepcopy(module)
    for call in calls:
        module(*call).square().sum().backward()
    means = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    for mean in means.values():
        all_reduce(mean)
        mean /= dist.get_world_size()
    return means


def near(mine, other):
    return mine.keys() == other.keys() and all(torch.allclose(mine[name], other[name], atol=1e-5) for name in other)


class Fails(torch.autograd.Function):
    """The identity, whose backward fails while `on`."""

    on = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.on:
            raise ZeroDivisionError
        return gradient


class Steps(nn.Module):
    """Three layers, of which a call may leave one out, and whose backward may fail before the first two."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, left_out=None):
        for number, layer in enumerate(self.layers):
            if number == 2:
                x = Fails.apply(x)
            x = x if number == left_out else layer(x)
        return x


def sharded_steps(**options):
    module = seeded(Steps)
    expected = copy.deepcopy(module)
    for layer in module.layers:
        fully_shard(layer, **options)
    return fully_shard(module, **options), expected


# --- stage 3 ---


def test_a_backward_that_fails_half_way_leaves_nothing_to_the_next(two):
    """The last layer's gradients are being reduced when the one before fails."""

    def run():
        module, whole = sharded_steps()
        Fails.on = True
        with pytest.raises(ZeroDivisionError):
            module(rows(1)).square().sum().backward()
        Fails.on = False
        module.zero_grad()
        module(rows()).square().sum().backward()
        return near(full_grads(module), averaged(whole, [rows()]))

    assert two.run(run) == [True, True]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_forgets_what_was_accumulated(two, set_to_none):
    def run():
        module = seeded(wide, 8, 3)
        whole = copy.deepcopy(module)
        optimizer = torch.optim.SGD(shard(module).parameters(), lr=1.0)
        with module.no_sync():
            module(rows(1)).square().sum().backward()
        optimizer.zero_grad(set_to_none)
        module(rows()).square().sum().backward()
        return near(full_grads(module), averaged(whole, [rows()]))

    assert two.run(run) == [True, True]


def test_a_step_before_the_last_micro_batch_changes_nothing(two):
    """There are no averaged gradients yet: a shard is not stepped with those of one rank."""

    def run():
        module = shard(seeded(wide, 8, 2))
        before = full_params(module)
        with module.no_sync():
            module(rows()).square().sum().backward()
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        return near(full_params(module), before)

    assert two.run(run) == [True, True]


@pytest.mark.parametrize("find_unused", [False, True])
def test_what_only_the_first_micro_batch_used_is_reduced_with_the_last(two, find_unused):
    def run():
        module, whole = sharded_steps(find_unused_parameters=find_unused)
        right = []
        for _ in range(2):
            module.zero_grad()
            with module.no_sync():
                module(rows()).square().sum().backward()
            module(rows(1), 1).square().sum().backward()
            right.append(near(full_grads(module), averaged(whole, [rows()], [rows(1), 1])))
        return right

    assert two.run(run) == [[True, True]] * 2


def test_gradients_of_inputs_can_be_asked_for_alone(two):
    def run():
        module = seeded(wide, 8, 3)
        (expected,) = torch.autograd.grad(module(x := rows().requires_grad_()).sum(), x)
        shard(module)
        (found,) = torch.autograd.grad(module(x).sum(), x)
        unused = all(parameter.grad is None for parameter in module.parameters())
        return torch.equal(found, expected), unused, [unit.gathered_bytes for unit in module.sharded_units]

    assert two.run(run) == [(True, True, [0, 0, 0])] * 2


def test_outputs_of_an_unknown_kind_are_reduced_before_backward_returns(two):
    class Output:
        def __init__(self, value):
            self.value = value

    class Hidden(nn.Linear):
        def forward(self, x):
            return Output(super().forward(x))

    def run():
        module = seeded(Hidden, 8, 8)
        exact = copy.deepcopy(module)
        exact(rows()).value.square().sum().backward()
        fully_shard(module)(rows()).value.square().sum().backward()
        total = exact.weight.grad
        all_reduce(total)
        return torch.allclose(full_grads(module)["weight"], total / 2, atol=1e-5)

    assert two.run(run) == [True, True]


def convert(module):
    module.bfloat16()


def assign(module):
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()}, assign=True)


def set_data(module):
    for parameter in module.parameters():
        parameter.data = parameter.data + 1


@pytest.mark.parametrize("change", [convert, assign, set_data], ids=lambda one: one.__name__)
def test_pieces_that_were_replaced_are_named(two, change):
    """Else the module would compute with its shards, and the optimizer would step something else."""

    def run():
        module = shard(wide(8, 2))
        change(module)
        module(rows())

    with pytest.raises(RankError, match="parameter 0.weight was converted, moved or replaced after it was sharded"):
        two.run(run)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reshard_after_forward": "no"}, "give True, False, or None"),
        ({"param_dtype": "bf16"}, "param_dtype is 'bf16'; give a floating-point dtype"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype is torch.int8; give"),
    ],
    ids=str,
)
def test_wrong_arguments_of_stage_3_are_named(two, options, words):
    with pytest.raises(RankError, match=words):
        two.run(lambda: fully_shard(nn.Linear(2, 2), **options))


# --- stages 1 and 2 ---


def trained(module, optimizer, steps, left_out=None):
    for step in range(steps):
        optimizer.zero_grad()
        module(rows(step).to(next(module.parameters()).dtype), left_out).float().square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "left_out"),
    [(torch.bfloat16, None), (torch.float32, 1)],
    ids=["16 bits in float32 copies", "a layer without gradients"],
)
def test_a_state_is_all_that_a_new_optimizer_needs(two, stage, dtype, left_out):
    def run():
        module = seeded(Steps).to(dtype)
        build = {"stage": stage, "lr": 1e-4, "find_unused_parameters": True}
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **build)
        trained(module, optimizer, 3, left_out)
        other = copy.deepcopy(module)
        new = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, **build)
        new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        trained(module, optimizer, 20)
        trained(other, new, 20)
        return all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))

    assert two.run(run) == [True, True]


def test_a_state_has_the_learning_rate_of_now(two):
    def run():
        optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
        optimizer.param_groups[0]["lr"] = 0.05  # as a scheduler does
        return optimizer.state_dict()["param_groups"][0]["lr"]

    assert two.run(run) == [0.05, 0.05]


def load_another():
    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    other = ZeroRedundancyOptimizer(
        nn.Sequential(*[nn.Linear(2, 2)] * 1, nn.Linear(2, 2)).parameters(), torch.optim.SGD
    )
    optimizer.load_state_dict(other.state_dict())


def build(kind):
    ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), kind)


@pytest.mark.parametrize(
    ("words", "function", "arguments"),
    [
        ("the state is of other parts than rank", load_another, ()),
        ("LBFGS looks at whole tensors", build, (torch.optim.LBFGS,)),
        ("Adafactor looks at whole tensors", build, (torch.optim.Adafactor,)),
        ("optimizer_class is 'AdamW'; give a class", build, ("AdamW",)),
    ],
)
def test_what_can_not_be_loaded_or_sharded_is_named(two, words, function, arguments):
    with pytest.raises(RankError, match=words):
        two.run(function, *arguments)
