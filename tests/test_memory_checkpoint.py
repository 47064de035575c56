"""A checkpoint changes what is held and nothing else: gradients, random numbers, buffers are those of a plain call."""

import copy
import functools
import random

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from labkit.memory import CheckpointError, MemoryLedger, checkpoint, checkpoint_sequential
from labkit.memory import create_selective_checkpoint_contexts as selective
from labkit.memory.random_states import RandomStates
from labkit.precision import autocast

reentrant = functools.partial(checkpoint, use_reentrant=True)
BOTH = pytest.mark.parametrize("call", [checkpoint, reentrant], ids=["hooks", "function"])


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def mixed_net():
    torch.manual_seed(0)
    parts = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()
    return nn.Sequential(*parts)


def trace(call, net=None, function=None, x=None):
    """All that a training step through `call` leaves behind: gradients, buffers, the next random number."""
    net = copy.deepcopy(net or mixed_net())
    torch.manual_seed(1)
    x = torch.randn(5, 6).requires_grad_() if x is None else x
    output = call(function or net, x) if function is None else function(call, net, x)
    torch.rand(5)  # what the rest of a network draws
    output.square().sum().backward()
    gradients = [p.grad for p in net.parameters()]
    return [x.grad, *gradients, *net.buffers(), torch.rand(3)]


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- the same bits ---


@BOTH
def test_gradients_statistics_and_random_numbers_are_those_of_a_plain_call(call):
    assert same(trace(plain), trace(call))


@pytest.mark.parametrize("options", [{"early_stop": False}, {"determinism_check": "none"}])
def test_so_they_are_with_other_options(options):
    assert same(trace(plain), trace(functools.partial(checkpoint, **options)))


@BOTH
def test_dropout_needs_the_random_state(call):
    assert not same(trace(plain), trace(functools.partial(call, preserve_rng_state=False)))


@BOTH
def test_checkpoints_may_be_nested(call):
    def nested(call, net, x):
        inner = lambda y: call(net[3:], call(net[1:3], y)).sin()  # noqa: E731
        return call(lambda y: inner(net[0](y)), x)

    assert same(trace(plain, function=nested), trace(call, function=nested))


def test_a_nested_checkpoint_holds_no_more_than_the_outer_ones_input():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])

    def half(part, x):
        return checkpoint(part[2:], checkpoint(part[:2], x))

    x = torch.randn(16, 64)
    with MemoryLedger(net) as ledger:
        output = checkpoint(half, net[4:], checkpoint(half, net[:4], x))
        assert ledger.now().of("activations") == 2 * x.nbytes  # one of them is what came in
        output.sum().backward()
    assert ledger.peak.of("activations") <= 6 * x.nbytes


@BOTH
def test_an_input_without_gradient_still_gives_the_parameters_theirs(call):
    x = torch.randn(5, 6)
    assert same(trace(plain, x=x), trace(call, x=x))


@BOTH
def test_keyword_arguments_containers_and_what_is_no_tensor_pass_through(call):
    def function(x, pair, *, scale, how):
        y = (x * pair[0] + pair[1]["b"]) * scale
        return {"y": y.exp(), "how": how, "two": (y.sin(), 3), "none": None}

    def step(call):
        torch.manual_seed(0)
        x, a, b, scale = (torch.randn(4, requires_grad=True) for _ in range(4))
        out = call(function, x, (a, {"b": b}), scale=scale, how="well")
        assert (out["how"], out["two"][1], out["none"]) == ("well", 3, None)
        (out["y"].sum() + out["two"][0].prod()).backward()
        return [x.grad, a.grad, b.grad, scale.grad]

    assert same(step(plain), step(call))


@BOTH
def test_a_tensor_that_is_used_twice_gets_both_gradients(call):
    def step(call):
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        call(lambda a, b: a.exp() * b + a, x, x).sum().backward()
        return [x.grad]

    assert same(step(plain), step(call))


@BOTH
def test_a_tensor_given_twice_is_the_same_one_in_the_recomputation(call):
    # attention multiplies once where query, key and value are one tensor
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def slope(call):
        x = torch.linspace(-1, 1, 48).view(2, 3, 8).requires_grad_()
        call(attention, x, x, value=x)[0].square().sum().backward()
        return x.grad

    assert torch.equal(slope(call), slope(plain))


@BOTH
def test_an_output_that_is_an_input_or_a_number_without_gradient(call):
    def step(call):
        x = torch.tensor([2.0, 1.0, 3.0], requires_grad=True)
        y, order = call(lambda a: (a, a.argsort()), x)
        assert order.tolist() == [1, 0, 2] and not order.requires_grad
        (y * 2).sum().backward()
        return [x.grad]

    assert same(step(plain), step(call))


@BOTH
def test_one_of_several_outputs_may_stay_unused(call):
    def step(call):
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        call(lambda a: (a.exp(), a.sin()), x)[1].sum().backward()
        return [x.grad]

    assert same(step(plain), step(call))


def test_without_gradients_the_function_is_just_called():
    with torch.no_grad():
        assert not checkpoint(nn.Linear(6, 3), torch.randn(2, 6)).requires_grad


# --- buffers ---


@BOTH
def test_batch_norm_counts_a_batch_once_where_pytorch_counts_it_twice(call):
    def counted(call):
        norm, x = nn.BatchNorm1d(6), torch.randn(5, 6, requires_grad=True)
        call(lambda y: norm(y).exp(), x).sum().backward()
        return int(norm.num_batches_tracked), norm.running_mean / x.mean(0).detach()

    times, share = counted(call)
    assert times == 1
    torch.testing.assert_close(share, torch.full((6,), 0.1))
    for theirs in (False, True):
        times, share = counted(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=theirs))
        assert times == 2
        torch.testing.assert_close(share, torch.full((6,), 0.19))


@BOTH
def test_a_buffer_on_which_the_result_depends_is_as_it_was(call):
    def spectral():
        torch.manual_seed(0)
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh())

    assert same(trace(plain, net=spectral()), trace(call, net=spectral()))


# --- autocast ---


@BOTH
@pytest.mark.parametrize("region", [torch.autocast, autocast], ids=["torch's", "labkit's"])
@pytest.mark.parametrize("around_backward", [False, True])
def test_the_recomputation_is_in_forwards_autocast(call, region, around_backward):
    seen = []

    def step(call):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(5, 6)

        def function(y):
            seen.append(net[0](y).dtype)
            return net(y)

        with region("cpu", torch.bfloat16, enabled=not around_backward):
            loss = call(function, x).float().square().sum()
        with region("cpu", torch.bfloat16, enabled=around_backward):
            loss.backward()
        return [p.grad for p in net.parameters()]

    wanted = step(plain)
    assert same(wanted, step(call))
    assert set(seen) == {torch.float32 if around_backward else torch.bfloat16}


@pytest.mark.parametrize("region", [torch.autocast, autocast], ids=["torch's", "labkit's"])
def test_a_weight_cast_without_gradient_in_a_checkpoint_is_not_used_outside_of_it(region):
    layer, x = nn.Linear(6, 6), torch.randn(5, 6)
    with region("cpu", torch.bfloat16):
        hidden = reentrant(layer, x)
        loss = layer(x).float().sum()
    assert hidden.requires_grad
    loss.backward()
    assert layer.weight.grad is not None


@BOTH
def test_new_tensors_are_on_forwards_default_device(call):
    seen, x = [], torch.ones(3, requires_grad=True)
    with torch.device("meta"):
        y = call(lambda v: seen.append(torch.empty(1).device.type) or v.exp().sin(), x)
    y.sum().backward()
    assert seen == ["meta", "meta"]


# --- several backward passes ---


def test_a_graph_that_is_kept_can_be_gone_through_again():
    net, x = mixed_net().eval(), torch.randn(5, 6, requires_grad=True)
    loss = checkpoint(net, x).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)


def test_a_kept_graph_holds_between_its_backward_passes_what_it_held_before():
    net, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()), torch.randn(5, 6)
    with MemoryLedger(net) as ledger:
        loss = checkpoint(net, x).sum()
        before = ledger.now().of("activations")
        loss.backward(retain_graph=True)
        assert ledger.now().of("activations") == before
        torch.autograd.grad(loss, net[2].bias, retain_graph=True)
        assert ledger.now().of("activations") == before


def test_a_graph_that_is_kept_does_not_keep_what_is_recomputed():
    def peak(keep):
        net = nn.Sequential(*[nn.Sequential(*[nn.Tanh() for _ in range(6)]) for _ in range(4)])
        with MemoryLedger(net) as ledger:
            x = torch.randn(5, 6, requires_grad=True)
            for part in net:
                x = checkpoint(part, x)
            x.sum().backward(retain_graph=keep)
        return ledger.peak.of("activations")

    assert peak(True) == pytest.approx(peak(False), abs=4 * 4 * 5 * 6)  # the inputs stay


def test_second_derivatives_are_those_of_a_plain_call():
    def second(call):
        x = torch.tensor([0.3, 0.7], requires_grad=True)
        (first,) = torch.autograd.grad(call(lambda a: (a.sin() * a.exp()).tanh(), x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    assert same(second(plain), second(checkpoint))


def test_a_gradient_may_be_taken_within_the_function():
    def force(x):
        energy = (x.sin() * x).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope * x

    def step(call):
        x = torch.tensor([0.3, 0.7], requires_grad=True)
        call(force, x).sum().backward()
        return [x.grad]

    assert same(step(plain), step(checkpoint))
    assert same(step(plain), step(functools.partial(checkpoint, early_stop=False)))


def test_a_function_that_looks_at_its_saved_tensors_twice():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x * 2)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (ctx.saved_tensors[0] + ctx.saved_tensors[1] / 2)

    for keep in (False, True):
        x = torch.tensor([2.0], requires_grad=True)
        checkpoint(lambda a: Twice.apply(a.exp().log()), x).backward(retain_graph=keep)
        torch.testing.assert_close(x.grad, torch.tensor([4.0]))


def test_a_part_of_a_backward_leaves_nothing_behind():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    with MemoryLedger(net) as ledger:
        loss = checkpoint(net, torch.randn(5, 6)).sum()
        torch.autograd.grad(loss, net[2].bias)
        assert ledger.now().of("activations") <= 4 * 5 * 6


def test_autograd_grad_is_refused_by_the_autograd_function():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="pass use_reentrant=False"):
        torch.autograd.grad(reentrant(torch.exp, x).sum(), x)


# --- early stop ---


def test_the_recomputation_ends_with_the_last_tensor_that_is_needed():
    calls = []

    def function(x):
        y = x.exp()
        calls.append("exp")
        z = y + 1
        calls.append("add")
        return z

    for stop, wanted in ((True, ["exp", "add"]), (False, ["exp", "add", "exp", "add"])):
        calls.clear()
        checkpoint(function, torch.ones(2, requires_grad=True), early_stop=stop).sum().backward()
        assert calls == wanted  # exp's own output is the last: `calls.append` is not reached any more


def test_the_function_cannot_mistake_the_early_end_for_an_error_of_its_own():
    def function(x):
        try:
            return x.exp()
        except Exception:
            return x.sin()

    x = torch.zeros(2, requires_grad=True)
    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_nor_can_it_go_on_after_catching_all_there_is():
    def function(x):
        try:
            y = x.exp()
        except:  # noqa: E722
            y = x.exp().cos()
        return y

    x = torch.ones(2, requires_grad=True)
    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2).exp())


# --- random states ---


def test_a_generator_among_the_arguments_is_set_back_too():
    def step(call):
        generator, x = torch.Generator().manual_seed(3), torch.ones(8, requires_grad=True)
        call(lambda a, g: a.exp() * torch.rand(8, generator=g), x, generator).sum().backward()
        return [x.grad, torch.rand(2, generator=generator)]

    assert same(step(plain), step(checkpoint))


def test_the_generator_of_a_device_is_found_by_the_device(monkeypatch):
    class Backend:
        default_generators = (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))

        @staticmethod
        def current_device():
            return 1

    monkeypatch.setattr(torch, "get_device_module", lambda _: Backend)
    states = RandomStates([torch.device("cuda", 0), torch.device("cuda"), torch.device("cpu")])
    drawn = [torch.rand(2, generator=one) for one in Backend.default_generators]
    states.keep_those_that_changed()
    assert [one for one, _ in states.states] == list(Backend.default_generators)
    with states.set_back():
        again = [torch.rand(2, generator=one) for one in Backend.default_generators]
    assert same(drawn, again)


# --- a function that is not the same twice ---


def test_other_shapes_are_refused_and_the_operation_named():
    sizes = iter([5, 3])

    def function(x):
        y = x[: next(sizes)]
        return y.exp()

    with pytest.raises(CheckpointError, match=r"`y\.exp\(\)` \(test_memory_checkpoint\.py, line \d+\).*\[3\].*\[5\]"):
        checkpoint(function, torch.ones(5, requires_grad=True)).sum().backward()


def test_within_a_layer_the_operation_and_its_caller_are_named():
    dtypes = iter([torch.float32, torch.float64])

    def function(x):
        return nn.functional.softplus(x.to(next(dtypes))).float()

    with pytest.raises(CheckpointError, match="softplus.*float64.*float32"):
        checkpoint(function, torch.ones(5, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(("first", "then", "words"), [(1, 2, "saves more"), (2, 1, "ends after")])
def test_more_or_fewer_tensors_are_refused(first, then, words):
    times = iter([first, then])

    def function(x):
        for _ in range(next(times)):
            x = x.sin()
        return x

    with pytest.raises(CheckpointError, match=words):
        checkpoint(function, torch.ones(5, requires_grad=True), early_stop=False).sum().backward()


def test_the_autograd_function_compares_outputs():
    sizes = iter([5, 3])
    with pytest.raises(CheckpointError, match=r"\[\[3\]\].*\[\[5\]\]"):
        reentrant(lambda x: x[: next(sizes)].exp(), torch.ones(5, requires_grad=True)).sum().backward()


@BOTH
def test_an_argument_that_was_changed_in_between_is_refused(call):
    x = torch.ones(5, requires_grad=True).clone()
    y = call(lambda a: a.exp().sin(), x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="in place|inplace"):
        y.sum().backward()


def test_a_parameter_that_was_stepped_in_between_is_refused():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    loss = checkpoint(layer, x).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(CheckpointError, match=r"parameter of shape \[4, 4\].*before the optimizer's step"):
        loss.backward()


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((torch.exp, torch.ones(2)), {"determinism_check": "some"}, "determinism_check must be"),
        ((torch.ones(2),), {}, "needs a function"),
        ((torch.exp, torch.ones(2)), {"use_reentrant": True, "context_fn": lambda: None}, "context_fn needs"),
    ],
)
def test_what_makes_no_checkpoint_is_refused(arguments, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        checkpoint(*arguments, **options)


# --- in segments ---


@pytest.mark.parametrize("segments", [1, 2, 3, 6])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_segments_give_the_same_bits(segments, use_reentrant):
    def call(net, x):
        return checkpoint_sequential(net, segments, x, use_reentrant=use_reentrant)

    assert same(trace(plain), trace(call))


def test_all_segments_but_the_last_are_checkpoints():
    net, x = nn.Sequential(*[nn.Tanh() for _ in range(7)]), torch.randn(5, 6, requires_grad=True)
    with MemoryLedger(net) as ledger:
        output = checkpoint_sequential(net, 3, x)
        assert ledger.now().of("activations") == (2 + 3) * x.nbytes  # two inputs; the outputs of the last three
    assert output.requires_grad


@pytest.mark.parametrize("segments", [0, 7])
def test_more_segments_than_functions_are_refused(segments):
    with pytest.raises(ValueError, match="segments must be 1 to 6"):
        checkpoint_sequential(mixed_net(), segments, torch.randn(5, 6))


# --- selective ---


def test_kept_operations_are_not_computed_again():
    aten, counted = torch.ops.aten, []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted.append(func)
            return func(*args, **(kwargs or {}))

    contexts = functools.partial(selective, [aten.addmm.default])
    net = mixed_net()
    for call, times in ((checkpoint, 3), (functools.partial(checkpoint, context_fn=contexts), 2)):
        counted.clear()
        output = call(net, torch.randn(5, 6, requires_grad=True))
        with Counting():
            output.sum().backward()
        assert counted.count(aten.addmm.default) + 2 == times + (call is checkpoint)
        assert counted.count(aten.relu.default) == 1


def test_with_kept_operations_the_bits_are_the_same():
    contexts = functools.partial(selective, [torch.ops.aten.addmm.default])
    call = functools.partial(checkpoint, context_fn=contexts)
    assert same(trace(plain), trace(call))

    def nested(call, net, x):
        return checkpoint(lambda y: call(net[1:], net[0](y)), x)

    assert same(trace(plain), trace(call, function=nested))


def test_a_function_may_choose_what_is_kept():
    asked = set()

    def choose(context, operation, *args, **kwargs):
        asked.add((context.is_recompute, operation))
        return operation is torch.ops.aten.addmm.default

    call = functools.partial(checkpoint, context_fn=functools.partial(selective, choose))
    assert same(trace(plain), trace(call))
    assert (False, torch.ops.aten.tanh.default) in asked


def test_what_is_drawn_after_a_kept_random_operation_is_drawn_again():
    def function(x):
        first, second = torch.rand_like(x), torch.rand_like(x)
        return (x * first).square() * second + torch.rand_like(x)

    def first_only(context, operation, *args, **kwargs):
        if operation is not torch.ops.aten.rand_like.default:
            return False
        calls.append(operation)
        return len(calls) == 1

    def slope(call):
        torch.manual_seed(3)
        x = torch.ones(4, requires_grad=True)
        call(function, x).sum().backward()
        return [x.grad, torch.rand(2)]

    calls = []
    call = functools.partial(checkpoint, context_fn=functools.partial(selective, first_only))
    assert same(slope(call), slope(plain))


def test_what_is_kept_counts_as_activations_and_an_outer_checkpoint_keeps_none_of_it():
    net, x = nn.Sequential(nn.Linear(6, 32), nn.Tanh()), torch.randn(5, 6)
    call = functools.partial(checkpoint, context_fn=functools.partial(selective, [torch.ops.aten.addmm.default]))
    with MemoryLedger(net) as ledger:
        output = call(net, x)  # the ledger takes x for the net's input
        assert ledger.now().of("inputs") == x.nbytes
        assert ledger.now().of("activations") == 4 * 5 * 32
        del output
        output = checkpoint(lambda y: call(net, y), x)
        assert ledger.now().of("activations") == 0
    assert output.requires_grad


def test_a_kept_output_that_is_changed_in_place_is_refused():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True))
    contexts = functools.partial(selective, [torch.ops.aten.addmm.default])
    loss = checkpoint(net, torch.randn(5, 6), context_fn=contexts).sum()
    with pytest.raises(RuntimeError, match="changed by an operation in place"):
        loss.backward()


def test_a_kept_operation_that_is_called_more_often_is_refused():
    times = iter([1, 2])
    fixed = torch.ones(2, 2)

    def function(x):
        for _ in range(next(times)):
            fixed.mm(fixed)
        return x.sin()

    contexts = functools.partial(selective, [torch.ops.aten.mm.default])
    with pytest.raises(CheckpointError, match="mm.default more often"):
        checkpoint(function, torch.ones(2, requires_grad=True), context_fn=contexts).sum().backward()


def test_a_family_of_operations_is_refused():
    with pytest.raises(TypeError, match="no single operation"):
        selective([torch.ops.aten.mm])


def test_random_of_python_is_not_set_back_as_in_pytorch():
    drawn = []
    checkpoint(
        lambda x: drawn.append(random.random()) or x.exp().sin(), torch.ones(2, requires_grad=True)
    ).sum().backward()
    assert drawn[0] != drawn[1]
