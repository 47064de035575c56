"""Which backward averages, what it leaves in the gradients, and what it says where something is missing."""

import contextlib
import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit import collectives
from labkit.collectives import background
from labkit.collectives.formulas import all_reduce_sent
from labkit.parallel import DistributedDataParallel
from labkit.parallel.data_parallel import average_each, average_flat
from labkit.parallel.data_parallel.outputs import tensors_in
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder
from labkit.verify import CASES


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three():
    with Ranks(3, timeout=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with Ranks(4, timeout=20) as ranks:
        yield ranks


def refused(ranks, words, function, *arguments):
    with pytest.raises(RankError, match=words) as caught:
        ranks.run(function, *arguments)
    return caught.value


def line(**options):
    """One weight, one bias: the gradient of `wrapper(x).sum()` is x and 1."""
    return DistributedDataParallel(nn.Linear(1, 1), **options)


def x(value=None):
    """[[rank + 1]] by default: over two ranks the mean is 1.5."""
    return torch.full((1, 1), float(dist.get_rank() + 1 if value is None else value))


def slope(wrapper):
    gradient = wrapper.module.weight.grad
    return None if gradient is None else gradient.item()


def on(ranks, function, *arguments):
    """What all ranks return alike."""
    values = ranks.run(function, *arguments)
    assert all(value == values[0] for value in values), values
    return values[0]


# --- when ---


def test_no_sync_is_read_at_forward_and_not_at_backward(two):
    def run():
        wrapper = line()
        with wrapper.no_sync():
            local = wrapper(x())
        local.backward()
        own = slope(wrapper)
        wrapper.zero_grad()
        averaged = wrapper(x())
        with wrapper.no_sync():
            averaged.backward()
        return own, slope(wrapper)

    assert two.run(run) == [(1.0, 1.5), (2.0, 1.5)]


def test_two_forwards_keep_what_each_was_told(two):
    """Whichever backward comes first."""

    def run(first):
        wrapper = line()
        averaged = wrapper(x())
        with wrapper.no_sync():
            local = wrapper(x(10 * dist.get_rank()))
        outputs = [averaged, local] if first == "averaged" else [local, averaged]
        seen = []
        for output in outputs:
            output.backward()
            seen.append(slope(wrapper))
        return seen

    # what is averaged last includes what was added before
    assert two.run(run, "local") == [[0.0, 1.5 + 5.0], [10.0, 1.5 + 5.0]]
    assert two.run(run, "averaged") == [[1.5, 1.5], [1.5, 11.5]]


def test_a_wrapper_that_only_its_output_holds_averages(two):
    def run():
        module = nn.Linear(1, 1)
        DistributedDataParallel(module)(x()).backward()
        return module.weight.grad.item(), module.weight._post_accumulate_grad_hooks

    value, hooks = on(two, run)
    assert value == 1.5 and not hooks


def test_no_sync_ends_with_its_block_even_by_an_error(two):
    def run():
        wrapper = line()
        with contextlib.suppress(ZeroDivisionError), wrapper.no_sync(), wrapper.no_sync():
            raise ZeroDivisionError
        wrapper(x()).backward()
        return slope(wrapper)

    assert on(two, run) == 1.5


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_either_way(two, set_to_none):
    def run():
        wrapper, seen = line(), []
        for step in range(3):
            wrapper.zero_grad(set_to_none=set_to_none)
            wrapper(x(step + dist.get_rank())).backward()
            seen.append(slope(wrapper))
        return seen

    assert on(two, run) == [0.5, 1.5, 2.5]


def test_gradients_that_are_never_zeroed_add_up_as_in_one_process(three):
    def run():
        wrapper, seen = line(), []
        for step in range(3):
            wrapper(x(3 * step + dist.get_rank())).backward()
            seen.append(round(slope(wrapper), 5))
        return seen

    assert on(three, run) == [1.0, 5.0, 12.0]


def test_several_forwards_before_one_backward(two):
    def run():
        wrapper = line()
        loss = wrapper(x()) + 2 * wrapper(x(10 * dist.get_rank()))
        with Recorder() as record:
            loss.backward()
        return slope(wrapper), record.messages_by("operation")["all_reduce"]

    assert on(two, run) == (1.5 + 2 * 5.0, all_reduce_sent("ring", 2, 4, 2).messages[0])


def test_several_forwards_with_a_buffer_in_the_graph(two):
    """The second forward broadcasts the buffers again; what autograd has saved of one that stays the same is valid."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("scale", torch.full((1,), 2.0))

        def forward(self, x):
            return x * self.weight * self.scale

    def run():
        wrapper = DistributedDataParallel(Scaled())
        (wrapper(x()) + wrapper(x())).sum().backward()
        return slope(wrapper)

    assert on(two, run) == 6.0


def test_one_graph_twice(two):
    def run():
        wrapper = line()
        output = wrapper(x())
        output.backward(retain_graph=True)
        (3 * output).backward()
        return slope(wrapper)

    assert on(two, run) == 1.5 + 4.5


def test_autograd_grad_sends_nothing_and_the_backward_after_it_averages(two):
    """A gradient penalty: the gradient with respect to the input, kept in the graph."""

    def run():
        wrapper, point = line(), x().requires_grad_()
        with torch.no_grad():
            wrapper.module.weight.fill_(3.0)
        output = wrapper(point)
        with Recorder() as record:
            (direction,) = torch.autograd.grad(output.sum(), point, create_graph=True)
        (output + direction.square()).sum().backward()
        return record.messages, slope(wrapper)

    assert on(two, run) == (0, 1.5 + 2 * 3.0)


def test_create_graph_leaves_the_mean_without_its_graph(two):
    def run():
        wrapper = line()
        wrapper(x()).square().sum().backward(create_graph=True)
        return wrapper.module.weight.grad.requires_grad, torch.isfinite(wrapper.module.weight.grad).all().item()

    assert on(two, run) == (False, True)


def test_only_a_forward_of_the_wrapper_itself_averages(two):
    def run():
        wrapper = line()
        wrapper.module(x()).backward()
        own = slope(wrapper)
        wrapper(x()).backward()
        return own, slope(wrapper)

    # the second averages the sum of both
    assert two.run(run) == [(1.0, 3.0), (2.0, 3.0)]


def test_a_penalty_on_the_parameters_counts_once(two):
    def run():
        wrapper = line()
        with torch.no_grad():
            wrapper.module.weight.fill_(3.0)
        (wrapper(x()).sum() + sum(p.square().sum() for p in wrapper.parameters())).backward()
        return slope(wrapper)

    assert on(two, run) == 1.5 + 6.0


def test_in_eval_mode_gradients_are_averaged_too(two):
    def run():
        wrapper = line().eval()
        wrapper(x()).backward()
        return slope(wrapper)

    assert on(two, run) == 1.5


@pytest.mark.parametrize("mode", ["eval", "no_grad", "eval with gradients, without a backward"])
def test_one_rank_alone_may_evaluate(two, mode):
    """Nothing is sent, though the model has buffers."""

    def run():
        wrapper = DistributedDataParallel(CASES["batch norm"].build())
        batch = torch.randn(4, 3, 8, 8)
        wrapper(batch).sum().backward()
        with Recorder() as record:
            if dist.get_rank() == 1:
                if mode != "no_grad":
                    wrapper.eval()
                with torch.no_grad() if mode != "eval with gradients, without a backward" else contextlib.nullcontext():
                    wrapper(batch)
                wrapper.train()
        wrapper(batch).sum().backward()
        return record.messages

    assert on(two, run) == 0


def test_two_networks_that_are_trained_in_turns(two):
    """A generator and a discriminator, each frozen while the other trains."""

    def run():
        generator, judge = line(), line()
        for one in (generator, judge):
            with torch.no_grad():
                one.module.weight.fill_(1.0)
        judge.requires_grad_(False)
        judge(generator(x())).backward()
        first = slope(generator), slope(judge)
        judge.requires_grad_(True)
        judge(generator(x(4)).detach()).backward()
        return first, slope(judge) is not None

    assert on(two, run) == ((1.5, None), True)


# --- what the module returns ---


@dataclass
class Pair:
    logits: torch.Tensor
    note: str


OUTPUTS = {
    "tensor": (lambda y: y, lambda out: out),
    "tuple": (lambda y: (y, None), lambda out: out[0]),
    "dict in a list": (lambda y: [{"a": (y,)}], lambda out: out[0]["a"][0]),
    "dataclass": (lambda y: Pair(y, "n"), lambda out: out.logits),
    "an object of its own": (lambda y: SimpleNamespace(y=y), lambda out: out.y),
    "with one that needs no gradient": (lambda y: (y.detach(), y), lambda out: out[1]),
    "a view": (lambda y: y[:1], lambda out: out),
}


class Returns(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.inner, self.form = nn.Linear(1, 1), form

    def forward(self, x):
        return OUTPUTS[self.form][0](self.inner(x))


@pytest.mark.parametrize("form", OUTPUTS)
@pytest.mark.parametrize("find_unused", [False, True])
def test_whatever_the_module_returns(two, form, find_unused):
    def run():
        wrapper = DistributedDataParallel(Returns(form), find_unused_parameters=find_unused)
        for _ in range(2):
            wrapper.zero_grad()
            OUTPUTS[form][1](wrapper(x())).sum().backward()
        return wrapper.module.inner.weight.grad.item()

    assert on(two, run) == 1.5


def test_an_output_may_be_changed_in_place(two):
    def run():
        wrapper = line()
        output = wrapper(x())
        output.mul_(2).add_(1)
        output.backward()
        return slope(wrapper)

    assert on(two, run) == 3.0


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        return self.left(x), self.right(x)


def test_a_loss_on_some_outputs_only_names_what_it_leaves_out(two):
    def run(find_unused):
        wrapper = DistributedDataParallel(Heads(), find_unused_parameters=find_unused)
        wrapper(x())[0].backward()
        return wrapper.module.left.weight.grad.item(), wrapper.module.right.weight.grad

    assert on(two, run, True) == (1.5, None)
    refused(
        two, r"computed no gradient for right.bias, right.weight: use them in every forward and in the loss", run, False
    )


# --- what is left out ---


def some_of(used):
    """Heads of which this rank uses those in `used`."""
    left, right = "left" in used, "right" in used
    wrapper = DistributedDataParallel(Heads(), find_unused_parameters=True)
    outputs = wrapper(x())
    return wrapper.module, (outputs[0] if left else 0) + (outputs[1] if right else 0)


def test_unused_on_all_ranks_keeps_none(three):
    def run():
        module, loss = some_of(["left"])
        loss.backward()
        return module.left.weight.grad.item(), module.right.weight.grad

    assert on(three, run) == (2.0, None)


def test_unused_on_some_ranks_is_averaged_with_zeros_for_them(three):
    def run():
        module, loss = some_of(["left", "right"] if dist.get_rank() == 2 else ["left"])
        loss.backward()
        return module.left.weight.grad.item(), module.right.weight.grad.item()

    assert on(three, run) == (2.0, 1.0)


def test_each_rank_may_use_another_part(two):
    def run():
        module, loss = some_of(["left"] if dist.get_rank() == 0 else ["right"])
        loss.backward()
        return module.left.weight.grad.item(), module.right.weight.grad.item()

    assert on(two, run) == (0.5, 1.0)


def test_what_no_sync_has_accumulated_counts_where_the_last_micro_batch_leaves_it_out(two):
    def run():
        wrapper = DistributedDataParallel(Heads(), find_unused_parameters=True)
        with wrapper.no_sync():
            left, right = wrapper(x())
        (left + right if dist.get_rank() == 0 else left).backward()
        wrapper(x())[0].backward()
        return wrapper.module.left.weight.grad.item(), wrapper.module.right.weight.grad.item()

    assert on(two, run) == (3.0, 0.5)


def test_without_find_unused_it_fails_at_the_end_of_that_backward_on_the_rank_at_fault(two):
    def run():
        wrapper = DistributedDataParallel(Heads())
        left, right = wrapper(x())
        place = "forward"
        try:
            place = "backward"
            (left + right if dist.get_rank() == 0 else left).backward()
        except RuntimeError as error:
            raise RuntimeError(f"in {place}: {error}") from None

    error = refused(
        two, "in backward: DistributedDataParallel: rank 1 computed no gradient for right.bias, right.weight", run
    )
    assert error.ranks == [1]


def test_after_that_error_on_all_ranks_the_wrapper_still_works(two):
    def run():
        wrapper = DistributedDataParallel(Heads(), bucket_cap_mb=1e-6)
        left, right = wrapper(x())
        with contextlib.suppress(RuntimeError):
            left.backward()
        wrapper.zero_grad()
        left, right = wrapper(x())
        (left + right).backward()
        return wrapper.module.left.weight.grad.item(), wrapper.module.right.weight.grad.item()

    assert on(two, run) == (1.5, 1.5)


class Wide(nn.Module):
    """A large layer, defined last and so reduced first, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.never, self.large = nn.Linear(1, 1), nn.Linear(1500, 1500, bias=False)

    def forward(self, x):
        return self.large(x)


def test_that_error_comes_when_what_was_begun_has_ended(two):
    def run():
        wrapper = DistributedDataParallel(Wide(), bucket_cap_mb=1e-6)
        with contextlib.suppress(RuntimeError):
            wrapper(torch.ones(1, 1500)).sum().backward()
        return [future.done() for future in background._last.values()]

    assert on(two, run) == [True]


def test_many_unused_ones_are_not_all_listed(two):
    def run():
        module = nn.ModuleList([nn.Linear(1, 1) for _ in range(5)])
        module.forward = lambda x: module[0](x)
        DistributedDataParallel(module)(x()).backward()

    refused(two, "no gradient for 1.bias, 1.weight, 2.bias, 2.weight, 3.bias and 3 more", run)


# --- failures ---


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_fails_in_backward_ends_all_with_its_cause(two, four, world_size):
    def run():
        wrapper = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=1e-6)
        hidden = wrapper.module[0](torch.ones(1, 4))
        output = wrapper(torch.ones(1, 4))

        def stumble(_):
            if dist.get_rank() == dist.get_world_size() - 1:
                raise ArithmeticError("the loss is not finite")

        wrapper.module[0].weight.register_post_accumulate_grad_hook(stumble)
        (output.sum() + hidden.sum()).backward()

    error = refused({2: two, 4: four}[world_size], "the loss is not finite", run)
    assert error.ranks == [world_size - 1] and error.type == "ArithmeticError"


def test_an_error_in_forward_leaves_the_wrapper_usable(two):
    class Picky(nn.Linear):
        def forward(self, x):
            if x.isnan().any():
                raise ValueError("not a number")
            return super().forward(x)

    def run():
        wrapper = DistributedDataParallel(Picky(1, 1))
        with contextlib.suppress(ValueError):
            wrapper(x(float("nan")))
        wrapper(x()).backward()
        return slope(wrapper)

    assert on(two, run) == 1.5


def test_an_error_in_backward_on_all_ranks_leaves_the_wrapper_usable(two):
    def run():
        wrapper = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), bucket_cap_mb=1e-6)

        def stumble(gradient):
            raise ArithmeticError

        handle = wrapper.module[0].weight.register_hook(stumble)
        with contextlib.suppress(ArithmeticError):
            wrapper(x()).backward()
        handle.remove()
        wrapper.zero_grad()
        with torch.no_grad():
            wrapper.module[1].weight.fill_(1)
        wrapper(x()).backward()
        return wrapper.module[0].weight.grad.item()

    assert on(two, run) == 1.5


def test_an_error_in_backward_that_one_rank_swallows_is_found_out(two):
    def run():
        wrapper = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), bucket_cap_mb=1e-6)

        def stumble(gradient):
            if dist.get_rank() == 1:
                raise ArithmeticError

        wrapper.module[0].weight.register_hook(stumble)
        with contextlib.suppress(ArithmeticError):
            wrapper(x()).backward()
        wrapper(x()).backward()

    refused(two, "calls a forward after a backward that ended in an error", run)


# --- what else models do ---


class Blocks(nn.Module):
    """Two blocks under activation checkpoints."""

    def __init__(self, reentrant, shared=False):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(4, 4)
        self.second = self.first if shared else nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        for block in (self.first, self.second):
            x = checkpoint(lambda x, block=block: torch.tanh(block(x)), x, use_reentrant=self.reentrant)
        return self.last(x)


def gradients_of_blocks(reentrant, shared, find_unused, wrap):
    torch.manual_seed(0)
    module = Blocks(reentrant, shared)
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2) if wrap else slice(0, 4)
    wrapper = DistributedDataParallel(module, find_unused_parameters=find_unused) if wrap else module
    wrapper(batch[rows].requires_grad_()).mean().backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize(("reentrant", "shared"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("find_unused", [False, True])
def test_activation_checkpoints(two, reentrant, shared, find_unused):
    wrapped = two.run(gradients_of_blocks, reentrant, shared, find_unused, True)
    whole = two.run(gradients_of_blocks, reentrant, shared, find_unused, False)
    for ours, truth in zip(wrapped[1], whole[0], strict=True):
        torch.testing.assert_close(ours, truth)


def test_a_parameter_in_two_reentrant_checkpoints_is_refused(two):
    words = "the gradient of first.weight was ready twice in one backward .* use_reentrant=False"
    refused(two, words.replace("weight", "(weight|bias)"), gradients_of_blocks, True, True, False, True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_wrapper_under_a_checkpoint(two, reentrant):
    def run():
        wrapper = line()
        checkpoint(wrapper, x().requires_grad_(), use_reentrant=reentrant).backward()
        return slope(wrapper)

    assert on(two, run) == 1.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_other_dtypes(two, dtype):
    def run():
        module = nn.Linear(2, 1).to(dtype)
        wrapper = DistributedDataParallel(module)
        wrapper(torch.full((1, 2), dist.get_rank() + 1.0, dtype=dtype)).abs().sum().backward()
        return module.weight.grad.dtype == dtype and torch.isfinite(module.weight.grad.abs()).all().item()

    assert on(two, run) is True


def test_division_comes_before_the_sum_so_that_float16_does_not_overflow(two):
    def run():
        wrapper = DistributedDataParallel(nn.Linear(1, 1).half())
        wrapper(torch.full((1, 1), 60000.0, dtype=torch.float16)).backward()
        return slope(wrapper)

    assert on(two, run) == pytest.approx(60000, rel=1e-3)


def test_a_channels_last_model(two):
    def run():
        torch.manual_seed(0)
        plain, batch = CASES["batch norm"].build().eval(), torch.randn(2, 3, 8, 8)
        wrapper = DistributedDataParallel(copy.deepcopy(plain).to(memory_format=torch.channels_last).eval())
        for module in (plain, wrapper):
            module(batch).sum().backward()
        for ours, truth in zip(wrapper.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, truth.grad)

    two.run(run)


def test_clipping_after_accumulation_is_that_of_one_process(two):
    def run():
        wrapper = line()
        with wrapper.no_sync():
            wrapper(x()).backward()
        wrapper(x()).backward()
        norm = nn.utils.clip_grad_norm_(wrapper.parameters(), 1.0)
        return round(norm.item(), 5), round(slope(wrapper), 5)

    norm = (3.0**2 + 2.0**2) ** 0.5
    assert on(two, run) == (round(norm, 5), round(3 / norm, 5))


def test_two_wrappers_in_one_backward(two):
    def run():
        first, second = line(), line()
        for wrapper in (first, second):
            with torch.no_grad():
                wrapper.module.weight.fill_(2.0)
                wrapper.module.bias.fill_(0.0)
        second(first(x())).backward()
        return slope(first), slope(second)

    assert on(two, run) == (3.0, 3.0)


def test_subgroups_average_each_on_its_own(four):
    def run():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        wrapper = line(process_group=groups[dist.get_rank() // 2])
        wrapper(x()).backward()
        return slope(wrapper)

    assert four.run(run) == [1.5, 1.5, 3.5, 3.5]


def test_an_axis_of_a_mesh_is_a_group_too(four):
    def run():
        from labkit.mesh import init_device_mesh, placement_of

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        wrapper = line(process_group=mesh["dp"])
        wrapper(x()).backward()
        return slope(wrapper), placement_of(wrapper.module.weight).replicated_over[0].name

    assert four.run(run) == [(2.0, "dp"), (3.0, "dp"), (2.0, "dp"), (3.0, "dp")]


def test_other_collectives_of_the_same_group_in_between(two):
    """In a hook during backward, while buckets are under way, and between forward and backward."""

    def run():
        wrapper = DistributedDataParallel(
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)), bucket_cap_mb=1e-3
        )
        sums = []

        def add_up(_gradient):
            sums.append(torch.ones(1000))
            collectives.all_reduce(sums[-1])

        output = wrapper(torch.ones(1, 64))
        wrapper.module[1].weight.register_hook(add_up)
        add_up(None)
        output.sum().backward()
        add_up(None)
        return [one.eq(2).all().item() for one in sums]

    assert on(two, run) == [True, True, True]


def test_gradients_may_be_read_by_other_names_of_a_tied_parameter(two):
    def run():
        module = CASES["tied"].build()
        wrapper = DistributedDataParallel(module)
        inputs, _ = CASES["tied"].batch()
        wrapper(inputs).sum().backward()
        return module.head.weight.grad is module.embedding.weight.grad

    assert on(two, run) is True


# --- the way there ---


@pytest.mark.parametrize("average", [average_each, average_flat])
def test_averaging_after_backward_gives_the_same_gradients_to_the_last_bit(three, average):
    def run():
        torch.manual_seed(0)
        module = CASES["image"].build()
        other = copy.deepcopy(module)
        batch = torch.randn(2, 3, 8, 8) + dist.get_rank()
        other(batch).sum().backward()
        average(other.parameters())
        # chunks of the ring differ where tensors are cut elsewhere, and with them the order of the sum
        wrapper = DistributedDataParallel(module, bucket_cap_mb=1e-6 if average is average_each else 1000)
        wrapper(batch).sum().backward()
        return max(
            (a.grad - b.grad).abs().max().item() for a, b in zip(module.parameters(), other.parameters(), strict=True)
        )

    assert max(three.run(run)) <= (0 if average is average_each else 1e-5)


def test_averaging_nothing_is_nothing(two):
    two.run(lambda: average_flat(nn.Linear(1, 1).parameters()))


def test_tensors_are_found_wherever_an_output_holds_them():
    first, second = torch.ones(1), torch.ones(2)
    for form in (
        [first, (second,)],
        {"a": first, "b": {"c": second}},
        Pair(first, [second]),
        ({0: Pair(second, "")}, first),
    ):
        assert {id(tensor) for tensor in tensors_in(form)} == {id(first), id(second)}
    assert list(tensors_in(["no tensor", None, 3, Pair])) == []
