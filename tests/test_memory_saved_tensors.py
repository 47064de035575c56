"""What autograd holds is seen from the moment it is saved to the moment it is let go, and is not held any longer."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from labkit.memory import MemoryLedger
from labkit.models import resnet, transformer
from labkit.verify.awkward import CASES

ROWS, WIDTH = 50, 16
ONE = 4 * ROWS * WIDTH  # bytes of one tensor of the networks below


class Deep(nn.Module):
    """Six times tanh of linear of tanh of linear: each layer's tanh holds its output, which the next linear holds."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def rows():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def activations(samples):
    return [sample.bytes for sample in samples if sample.kind == "activations"]


def test_what_backward_has_used_is_let_go():
    net = Deep()
    with MemoryLedger(net) as ledger:
        loss = net(rows()).sum()
        assert ledger.now().of("activations") == 12 * ONE
        loss.backward()
        assert ledger.now().of("activations") == 0


def test_retaining_the_graph_retains_its_activations_until_the_graph_goes():
    net = Deep()
    with MemoryLedger(net) as ledger:
        loss = net(rows()).sum()
        loss.backward(retain_graph=True)
        assert ledger.now().of("activations") == 12 * ONE
        loss.backward(retain_graph=True)
        assert ledger.now().of("activations") == 12 * ONE
        del loss
        assert ledger.now().of("activations") == 0


def test_a_graph_that_is_dropped_without_backward_is_let_go():
    net = Deep()
    with MemoryLedger(net) as ledger:
        loss = net(rows()).sum()
        del loss
        assert ledger.now().of("activations") == 0


def test_a_sum_of_losses_keeps_every_graph():
    net, total = Deep(), 0
    with MemoryLedger(net) as ledger:
        for _ in range(3):
            total = total + net(rows()).sum()
        assert ledger.now().of("activations") == 3 * 12 * ONE
        total.backward()
        assert ledger.now().of("activations") == 0


def test_a_sum_of_losses_after_their_backward_keeps_no_activation():
    net, total = Deep(), 0
    with MemoryLedger(net) as ledger:
        for _ in range(3):
            loss = net(rows()).sum()
            loss.backward()
            total = total + loss
        assert ledger.now().of("activations") == 0


def test_an_output_that_is_kept_is_no_activation_once_its_graph_is_gone():
    net = Deep()
    with MemoryLedger(net) as ledger:
        output = net(rows())
        output.sum().backward()
        assert ledger.now().of("activations") == 0


def test_half_a_backward_lets_half_go():
    net = Deep()
    with MemoryLedger(net) as ledger:
        first, second = net(rows()).sum(), net(rows()).sum()
        first.backward()
        assert ledger.now().of("activations") == 12 * ONE
    assert second.requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_holds_the_inputs_of_its_regions_and_then_one_region_at_a_time(reentrant):
    from labkit.record import Recorder

    x = rows().requires_grad_()
    net = Deep(reentrant)
    with Recorder() as record, MemoryLedger(net) as ledger:
        loss = net(x).sum()
        assert ledger.now().of("activations") == 6 * ONE
        before = len(record.ranks[0].memory)
        loss.backward()
        assert ledger.now().of("activations") == 0
    # in the last region its two tanh outputs are computed again, while all inputs are still there
    assert max(activations(record.ranks[0].memory[before:])) == 8 * ONE


def test_what_checkpointing_computes_again_belongs_to_the_module_that_computes_it():
    net = Deep(False)
    with MemoryLedger(net) as ledger:
        ledger.track("ballast", lambda: [torch.zeros(0)])
        loss = net(rows().requires_grad_()).sum()
        ledger.reset_peak()
        loss.backward()
    names = set(ledger.by_module("activations"))
    assert names <= {"(root)", *(f"layers.{i}.{j}" for i in range(6) for j in (1, 3))}
    assert len(names) > 1


def test_checkpoints_within_checkpoints_work_and_give_the_same_gradients():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep = Deep(False)

        def forward(self, x):
            return checkpoint(self.deep, x, use_reentrant=False)

    plain, nested = Deep(), Nested()
    nested.deep.load_state_dict(plain.state_dict())
    plain(rows()).sum().backward()
    with MemoryLedger(nested) as ledger:
        loss = nested(rows().requires_grad_()).sum()
        assert ledger.now().of("activations") == ONE
        loss.backward()
        assert ledger.now().of("activations") == 0
    for one, other in zip(plain.parameters(), nested.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_what_selective_checkpointing_keeps_by_itself_is_counted_where_it_respects_hooks():
    kept = [torch.ops.aten.tanh.default]

    class Selective(Deep):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(
                    layer,
                    x,
                    use_reentrant=False,
                    context_fn=lambda: create_selective_checkpoint_contexts(kept),
                    respect_saved_tensors_hooks=True,
                )
            return x

    plain, net = Deep(), Selective()
    net.load_state_dict(plain.state_dict())
    plain(rows()).sum().backward()
    with MemoryLedger(net) as ledger:
        loss = net(rows().requires_grad_()).sum()
        assert ledger.now().of("activations") == 13 * ONE  # each tanh, and what the first region was called with
        loss.backward()
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_hooks_of_others_inside_and_around_go_on_working_and_are_counted():
    net, seen = Deep(), []
    outer = saved_tensors_hooks(lambda t: (seen.append(t.shape), t.detach().clone())[1], torch.Tensor.clone)
    with outer, MemoryLedger(net) as ledger:
        loss = net(rows()).sum()
        assert len(seen) > 12 and ledger.now().of("activations") > 12 * ONE  # a copy of each, of the weights too
        loss.backward()
        assert ledger.now().of("activations") == 0
    with MemoryLedger(net) as ledger, save_on_cpu():
        loss = net(rows()).sum()
        assert ledger.now().of("activations") == 12 * ONE
        loss.backward()
        assert ledger.now().of("activations") == 0
    seen.clear()
    with (
        MemoryLedger(net) as ledger,
        saved_tensors_hooks(lambda t: (seen.append(t.shape), t.half())[1], torch.Tensor.float),
    ):
        loss = net(rows()).sum()
        halves = ledger.now().of("activations")
        loss.backward()
        assert ledger.now().of("activations") == 0
    assert len(seen) > 12 and halves > 12 * ONE / 2  # copies in half the bytes, of the weights too, and each apart


def test_hooks_that_are_entered_afterwards_are_as_they_were():
    before = saved_tensors_hooks.__enter__
    with MemoryLedger(Deep()):
        assert saved_tensors_hooks.__enter__ is not before
    assert saved_tensors_hooks.__enter__ is before


def test_the_result_of_an_operation_in_place_is_counted_once():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    with MemoryLedger(net) as ledger:
        loss = net(rows()).sum()
        assert ledger.now().of("activations") == ONE
        loss.backward()


def test_a_saved_tensor_that_is_changed_in_place_is_refused_as_without_the_ledger():
    net = Deep()
    with MemoryLedger(net):
        output = net(rows())
        output.add_(1)
        with pytest.raises(RuntimeError, match="was changed by an operation in place"):
            output.sum().backward()
    output = net(rows())
    output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_second_derivatives_are_the_same():
    def penalty(net):
        x = rows().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [parameter.grad for parameter in net.parameters()]

    one = Deep()
    other = Deep()
    other.load_state_dict(one.state_dict())
    wanted = penalty(one)
    with MemoryLedger(other) as ledger:
        got = penalty(other)
        assert ledger.now().of("activations") == 0
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_awkward_models_have_the_same_gradients_under_the_ledger(name):
    case = CASES[name]
    inputs, targets = case.batch()
    gradients = []
    for ledger in (None, MemoryLedger):
        torch.manual_seed(0)
        net = case.build()
        torch.manual_seed(1)
        if ledger is None:
            case.loss(net(inputs), targets)[0].backward()
        else:
            with ledger(net) as book:
                case.loss(net(inputs), targets)[0].backward()
                assert book.now().of("activations") == 0
        gradients.append([parameter.grad for parameter in net.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_nothing_lives_longer_for_the_ledger():
    def living(ledger):
        """Which of a step's tensors are alive at four moments."""
        net = Deep()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        watched, moments = [], []
        for layer in net.modules():
            layer.register_forward_hook(lambda *call: watched.append(weakref.ref(call[2].untyped_storage())))

        def look():
            gc.collect()
            moments.append([reference() is not None for reference in watched])

        def step():
            x = rows()
            watched.append(weakref.ref(x.untyped_storage()))
            loss = net(x).sum()
            del x
            look()
            loss.backward()
            watched.extend(weakref.ref(parameter.grad.untyped_storage()) for parameter in net.parameters())
            look()
            optimizer.step()
            optimizer.zero_grad()
            look()

        if ledger:
            with MemoryLedger(net, optimizer):
                step()
                look()
        else:
            step()
            look()
        return moments

    assert living(ledger=True) == living(ledger=False)


def test_a_graph_does_not_keep_the_module_nor_the_ledger():
    net = Deep()
    with MemoryLedger(net) as ledger:
        loss = net(rows()).sum()
    references = weakref.ref(net), weakref.ref(ledger)
    del net, ledger
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    loss.backward()


@pytest.mark.parametrize("workload", ["image", "text"])
def test_pytorchs_own_count_of_allocations_agrees_to_the_byte(workload):
    """An independent referee: the profiler sums what was allocated and not freed within the forward pass."""
    classes, batch = 7, 4
    if workload == "image":
        net, inputs = resnet(8, num_classes=classes, in_channels=1), torch.randn(batch, 1, 12, 12)
    else:
        net = transformer(vocab_size=20, num_classes=classes, max_len=9, d_model=16)
        inputs = torch.randint(1, 20, (batch, 9))
    targets = torch.randint(classes, (batch,))
    F.cross_entropy(net(inputs), targets)
    with MemoryLedger(net) as ledger:
        ledger.track("inputs", targets)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = F.cross_entropy(net(inputs), targets)
        events = profiler.profiler.kineto_results.events()
        allocated = sum(event.nbytes() for event in events if event.name() == "[memory]")
        assert ledger.now().of("activations") == allocated - loss.element_size()
