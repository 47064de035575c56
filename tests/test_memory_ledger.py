"""The ledger counts what training holds, to the byte: against counts by hand on small networks."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit.memory import MemoryBudgetError, MemoryLedger
from labkit.record import Recorder

FLOAT, INT = 4, 8


class Two(nn.Module):
    """Linear 6 to 8, ReLU, linear 8 to 3: 83 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


PARAMETERS = FLOAT * (6 * 8 + 8 + 8 * 3 + 3)
BATCH = 5
HIDDEN = FLOAT * BATCH * 8  # what ReLU holds, which is what the second layer holds


def inputs(dtype=torch.float32):
    return torch.randn(BATCH, 6, dtype=dtype)


def test_parameters_inputs_activations_and_gradients_are_what_a_hand_counts():
    net, x = Two(), inputs()
    with MemoryLedger(net) as ledger:
        assert ledger.now().by_kind() == {"parameters": PARAMETERS}
        loss = net(x).sum()
        assert ledger.now().by_kind() == {
            "parameters": PARAMETERS,
            "inputs": FLOAT * BATCH * 6,
            "activations": HIDDEN,
        }
        loss.backward()
        assert ledger.now().by_kind() == {
            "parameters": PARAMETERS,
            "inputs": FLOAT * BATCH * 6,
            "gradients": PARAMETERS,
        }
    assert ledger.peak.total == ledger.now().total == 2 * PARAMETERS + FLOAT * BATCH * 6


def test_the_loss_holds_logarithms_targets_and_the_sum_of_weights():
    net, targets = Two(), torch.zeros(BATCH, dtype=torch.int64)
    with MemoryLedger(net) as ledger:
        F.cross_entropy(net(inputs()), targets)
        loss = F.cross_entropy(net(inputs()), targets)
        held = ledger.now().by_module("activations")
    assert held == {"(root)": HIDDEN, "(outside)": FLOAT * (BATCH * 3 + 1) + INT * BATCH}
    assert loss.requires_grad


def test_targets_that_are_tracked_as_inputs_are_no_activations():
    net, targets = Two(), torch.zeros(BATCH, dtype=torch.int64)
    with MemoryLedger(net) as ledger:
        ledger.track("inputs", {"targets": [targets]})
        loss = F.cross_entropy(net(inputs()), targets)
        assert ledger.now().of("activations") == HIDDEN + FLOAT * (BATCH * 3 + 1)
        assert ledger.now().by_module("inputs")["(outside)"] == INT * BATCH
    assert loss.requires_grad


def test_what_turns_out_to_be_an_input_is_no_activation_any_more():
    net, targets = Two(), torch.zeros(BATCH, dtype=torch.int64)
    with MemoryLedger(net) as ledger:
        loss = F.cross_entropy(net(inputs()), targets)
        before = ledger.now()
        ledger.track("inputs", targets)
        assert ledger.now().total == before.total
        assert ledger.now().of("activations") == before.of("activations") - INT * BATCH
        loss.backward()
        assert ledger.now().by_module("inputs")["(outside)"] == INT * BATCH


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), PARAMETERS),
        (lambda p: torch.optim.AdamW(p), 2 * PARAMETERS + 4 * FLOAT),  # the steps of four tensors
    ],
    ids=["sgd", "momentum", "adamw"],
)
def test_the_optimizer_state_appears_with_the_first_step(make, state):
    net = Two()
    optimizer = make(net.parameters())
    with MemoryLedger(net, optimizer) as ledger:
        net(inputs()).sum().backward()
        assert ledger.now().of("optimizer_state") == 0
        optimizer.step()
        assert ledger.now().of("optimizer_state") == state
        optimizer.zero_grad()
        assert ledger.now().of("gradients") == 0
        assert ledger.now().of("optimizer_state") == state


def test_state_that_was_there_before_is_counted_from_the_start():
    net = Two()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(inputs()).sum().backward()
    optimizer.step()
    with MemoryLedger(net, optimizer) as ledger:
        assert ledger.now().by_kind() == dict.fromkeys(("parameters", "gradients", "optimizer_state"), PARAMETERS)


def test_zeroing_without_none_keeps_the_gradients():
    net = Two()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with MemoryLedger(net, optimizer) as ledger:
        net(inputs()).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        assert ledger.now().of("gradients") == PARAMETERS


def test_accumulating_gradients_takes_no_more_of_them():
    net = Two()
    with MemoryLedger(net) as ledger:
        for _ in range(3):
            net(inputs()).sum().backward()
        assert ledger.now().of("gradients") == PARAMETERS
        assert ledger.peak.of("activations") <= HIDDEN


def test_frozen_parameters_are_parameters_without_gradients():
    net = Two()
    net.first.requires_grad_(False)
    with MemoryLedger(net) as ledger:
        net(inputs()).sum().backward()
        assert ledger.now().of("parameters") == PARAMETERS
        assert ledger.now().by_module("gradients") == {"second": FLOAT * 27}


def test_a_frozen_weight_that_backward_needs_is_no_activation():
    net = Two()
    net.second.requires_grad_(False)
    with MemoryLedger(net) as ledger:
        loss = net(inputs()).sum()
        assert ledger.now().of("activations") == HIDDEN
    assert loss.requires_grad


def test_tied_weights_and_views_count_once():
    net = Two()
    net.second.weight = nn.Parameter(torch.randn(8, 6))  # the same shape, and then the same tensor
    net.first.weight = net.second.weight
    net.register_buffer("part", net.first.weight.detach()[:2])
    with MemoryLedger(net) as ledger:
        assert ledger.now().of("parameters") == FLOAT * (48 + 8 + 3)
        assert ledger.now().of("buffers") == 0


def test_a_view_keeps_its_whole_storage():
    net, big = nn.Linear(6, 1), torch.randn(100, 6)
    with MemoryLedger(net) as ledger:
        net(big[:2])
        assert ledger.now().of("inputs") == FLOAT * 600


def test_buffers_are_counted_and_running_statistics_are_no_activations():
    net = nn.BatchNorm1d(6)
    with MemoryLedger(net) as ledger:
        loss = net(inputs()).sum()
        assert ledger.now().of("buffers") == FLOAT * 12 + INT
        assert ledger.now().of("activations") == FLOAT * 12  # mean and 1/std; the input is the batch
    assert loss.requires_grad


def test_numbers_of_eight_bytes_count_eight():
    net = Two().double()
    with MemoryLedger(net) as ledger:
        loss = net(inputs(torch.float64)).sum()
        assert ledger.now().of("activations") == 2 * HIDDEN
        loss.backward()
        assert ledger.now().of("parameters") == ledger.now().of("gradients") == 2 * PARAMETERS


def test_mixed_types_count_each_by_its_size():
    class Mixed(Two):
        def forward(self, x):
            return self.second(F.relu(self.first(x)).bfloat16())

    net = Mixed()
    net.second.bfloat16()
    with MemoryLedger(net) as ledger:
        loss = net(inputs()).sum()
        assert ledger.now().by_module("activations") == {"(root)": HIDDEN, "second": HIDDEN // 2}
        assert ledger.now().of("parameters") == FLOAT * 56 + 2 * 27
    assert loss.requires_grad


def test_autocast_copies_of_weights_are_activations_of_their_layer():
    net = Two()
    with MemoryLedger(net) as ledger, torch.autocast("cpu", torch.bfloat16):
        loss = net(inputs()).sum()
        held = ledger.now().by_module("activations")
    # the layer's input in 16 bits; the weight too where a gradient goes through it
    assert held["first"] == 2 * BATCH * 6
    assert held["second"] == 2 * 8 * 3
    assert loss.requires_grad


def test_what_a_submodule_saves_is_its_own_even_deep_inside():
    net = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Tanh())), nn.Linear(8, 3))
    with MemoryLedger(net) as ledger:
        loss = net(inputs()).sum()
        assert ledger.now().by_module("activations") == {"0.1.0": HIDDEN}
    assert loss.requires_grad


def test_a_module_called_twice_holds_twice():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    with MemoryLedger(net) as ledger:
        x = inputs()
        loss = net(net(x)).sum()
        assert ledger.now().by_module("activations") == {"1": 2 * FLOAT * BATCH * 6}
        assert ledger.now().of("inputs") == FLOAT * BATCH * 6  # the second input is an activation
    assert loss.requires_grad


def test_without_gradients_nothing_is_held():
    net = Two()
    with MemoryLedger(net) as ledger, torch.no_grad():
        net(inputs())
        assert ledger.now().by_kind().keys() == {"parameters"}


def test_the_peak_is_the_highest_moment_and_says_what_was_alive_then():
    net = Two()
    with MemoryLedger(net) as ledger:
        large = net(torch.randn(500, 6)).sum()
        del large
        loss = net(inputs()).sum()
        loss.backward()
    assert ledger.peak.by_kind() == {"parameters": PARAMETERS, "inputs": FLOAT * 3000, "activations": FLOAT * 4000}
    assert ledger.by_module() == {
        "first": FLOAT * 56,
        "second": FLOAT * 27,
        "(root)": FLOAT * 7000,
    }


def test_the_peak_may_be_looked_for_anew():
    net = Two()
    with MemoryLedger(net) as ledger:
        net(torch.randn(500, 6)).sum().backward()
        ledger.reset_peak()
        net(inputs()).sum().backward()
    assert ledger.peak.of("activations") <= HIDDEN


def test_an_exception_in_the_middle_leaves_nothing_behind():
    class Breaks(Two):
        def forward(self, x):
            super().forward(x)
            raise KeyError("broken")

    net = Breaks()
    with pytest.raises(KeyError), MemoryLedger(net) as ledger:
        net(inputs())
    assert not (net._forward_hooks or net._forward_pre_hooks or net.first._forward_hooks)
    assert not net.first.weight._post_accumulate_grad_hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert ledger.peak.of("parameters") == PARAMETERS


def test_a_caught_exception_does_not_spoil_the_names():
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.breaks = nn.Tanh(), True

        def forward(self, x):
            if self.breaks:
                raise KeyError("broken")
            return self.inner(x)

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.fragile, self.after = Fragile(), nn.Linear(6, 6)

        def forward(self, x):
            try:
                x = self.fragile(x)
            except KeyError:
                self.fragile.breaks = False
            return self.after(x).exp()

    with MemoryLedger(Tries()) as ledger:
        loss = ledger.module(inputs()).sum()
        assert ledger.now().by_module("activations") == {"(root)": FLOAT * BATCH * 6}
    assert loss.requires_grad


def test_an_exception_before_a_submodule_began_does_not_spoil_the_names_either():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.refuses = nn.Tanh()
            self.refuses.register_forward_pre_hook(lambda *_: 1 / 0)

        def forward(self, x):
            with contextlib.suppress(ZeroDivisionError):
                self.refuses(x)
            return (x * x).requires_grad_().exp()

    with MemoryLedger(Tries()) as ledger:
        loss = ledger.module(inputs()).sum()
        assert ledger.now().by_module("activations") == {"(root)": FLOAT * BATCH * 6}
    assert loss.requires_grad


def test_a_ledger_can_be_opened_again_but_not_twice():
    net = Two()
    ledger = MemoryLedger(net)
    with ledger:
        net(torch.randn(500, 6))
        with pytest.raises(RuntimeError, match="open already"):
            ledger.__enter__()
    with ledger:
        assert ledger.peak.by_kind() == {"parameters": PARAMETERS}


def test_two_ledgers_see_the_same():
    net = Two()
    with MemoryLedger(net) as outer, MemoryLedger(net.second) as inner:
        loss = net(inputs()).sum()
        assert outer.now().by_module("activations") == {"(root)": HIDDEN}
        # to the inner one the outer one's batch is something that autograd holds outside of its module
        assert inner.now().by_module("activations") == {"(outside)": HIDDEN + FLOAT * BATCH * 6}
        assert inner.now().of("parameters") == FLOAT * 27
    assert loss.requires_grad


def test_what_is_tracked_by_a_function_is_asked_for_again():
    net, buckets = Two(), []
    with MemoryLedger(net) as ledger:
        ledger.track("gathered", lambda: buckets, module="first")
        buckets.append(torch.zeros(100))
        net(inputs())
        assert ledger.now().by_module("gathered") == {"first": 400}
        buckets.clear()
        assert ledger.now().of("gathered") == 0


def test_what_a_submodule_gathers_for_its_forward_alone_is_seen_at_the_peak():
    net, gathered = Two(), []
    net.second.register_forward_pre_hook(lambda *_: gathered.append(torch.zeros(1000)))
    net.second.register_forward_hook(lambda *_: gathered.clear())
    with MemoryLedger(net) as ledger:
        ledger.track("gathered", lambda: gathered)
        net(inputs())
        assert ledger.peak.of("gathered") == 4000
        assert ledger.now().of("gathered") == 0


def test_a_storage_that_shrinks_and_grows_is_counted_at_its_size():
    unit = torch.zeros(100)
    with MemoryLedger(Two()) as ledger:
        ledger.track("gathered", lambda: unit)
        unit.untyped_storage().resize_(0)
        assert ledger.now().of("gathered") == 0
        unit.untyped_storage().resize_(400)
        assert ledger.now().of("gathered") == 400


def test_a_parameter_with_new_data_is_still_a_parameter():
    net = Two()
    with Recorder() as record, MemoryLedger(net):
        handle = net.second.register_forward_pre_hook(
            lambda module, _: setattr(module.weight, "data", torch.randn(3, 8))
        )
        loss = net(inputs()).sum()
        handle.remove()
    assert max(sample.bytes for sample in record.ranks[0].memory if sample.kind == "activations") == HIDDEN
    assert loss.requires_grad


def test_sparse_gradients_count_their_indices_and_values():
    net = nn.Embedding(100, 4, sparse=True)
    with MemoryLedger(net) as ledger:
        net(torch.tensor([1, 2, 3])).sum().backward()
        assert ledger.now().of("gradients") == INT * 3 + FLOAT * 12


def test_each_change_is_told_to_the_open_recorder():
    net, x = Two(), inputs()
    with Recorder() as record, MemoryLedger(net) as ledger:
        net(x).sum().backward()
    samples = record.ranks[0].memory
    assert [sample.kind for sample in samples[:4]] == ["parameters"] * 4
    last = {sample.kind: sample.bytes for sample in samples}
    assert last == {**ledger.now().by_kind(), "activations": 0}
    assert max(sample.bytes for sample in samples if sample.kind == "activations") == HIDDEN


def test_a_recorder_that_is_opened_later_hears_what_was_there_before():
    net = Two()
    with MemoryLedger(net):
        with Recorder() as record:
            net(inputs())
    assert {sample.kind: sample.bytes for sample in record.ranks[0].memory}["parameters"] == PARAMETERS


def test_a_budget_refuses_what_does_not_fit_and_says_what():
    net = Two()
    with MemoryLedger(net, budget_bytes=PARAMETERS + FLOAT * BATCH * 6 + HIDDEN - 1) as ledger:
        sentence = (
            r"160 B of activations in \(root\) don't fit: 452 B are alive \(parameters 332 B, inputs 120 B\), and"
        )
        with pytest.raises(MemoryBudgetError, match=sentence):
            net(inputs())
        assert ledger.now().of("activations") == 0
        assert 0 not in [entry.bytes for entry in ledger._account.entries.values()]
        with torch.no_grad():
            net(inputs())


def test_a_budget_that_fits_exactly_is_enough():
    net, x = Two(), inputs()
    with MemoryLedger(net, budget_bytes=2 * PARAMETERS + FLOAT * BATCH * 6) as ledger:
        net(x).sum().backward()
        assert ledger.now().total == ledger.budget_bytes


def test_a_budget_stops_backward_and_the_optimizer_too():
    net = Two()
    optimizer = torch.optim.AdamW(net.parameters())
    with MemoryLedger(net, optimizer, budget_bytes=2 * PARAMETERS) as ledger:
        with pytest.raises(MemoryBudgetError, match="of gradients in second don't fit"):
            net(inputs()).sum().backward()
    net.zero_grad()
    with MemoryLedger(net, optimizer, budget_bytes=3 * PARAMETERS) as ledger:
        net(inputs()).sum().backward()
        with pytest.raises(MemoryBudgetError, match="of optimizer state in first don't fit"):
            optimizer.step()
    assert ledger.peak.total <= 3 * PARAMETERS


def test_parameters_that_do_not_fit_are_refused_at_the_start():
    net = Two()
    with pytest.raises(MemoryBudgetError, match="of parameters in second don't fit"):
        MemoryLedger(net, budget_bytes=PARAMETERS - 1).__enter__()
    net(inputs()).sum().backward()
    assert not net._forward_hooks


def test_what_is_no_module_or_no_budget_is_refused():
    with pytest.raises(TypeError, match="of a module, not of a list"):
        MemoryLedger([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget_bytes must be at least 0"):
        MemoryLedger(Two(), budget_bytes=-1)
    with pytest.raises(RuntimeError, match="not open"):
        MemoryLedger(Two()).track("inputs", torch.zeros(1))
