"""Policies for blocks: the same bits, names as before, the peak that the formula says, the best for a budget."""

import copy
import functools
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit.memory import (
    BlockCost,
    MemoryBudgetError,
    MemoryLedger,
    best_groups,
    checkpoint_blocks,
    checkpointed_peak,
    checkpointed_resnet,
    checkpointed_transformer,
    groups_of,
    measure_blocks,
)
from labkit.models import resnet, transformer
from labkit.record import Recorder

SIZES = {"d_model": 32, "num_layers": 5, "num_heads": 4}
POLICIES = [1, 2, 5, "sqrt", "selective", [range(1, 3), range(4, 5)]]


@functools.cache
def text(dropout=0.0, head="class"):
    torch.manual_seed(0)
    classes = {"num_classes": 5} if head == "class" else {}
    model = transformer(vocab_size=50, max_len=16, dropout=dropout, head=head, **classes, **SIZES)
    targets = torch.randint(5, (4,)) if head == "class" else torch.randint(50, (64,))
    return model, torch.randint(50, (4, 16)), targets


@functools.cache
def image(norm="batch", depth=8):
    torch.manual_seed(0)
    return resnet(depth, num_classes=10, norm=norm), torch.randn(4, 3, 16, 16), torch.randint(10, (4,))


def step(workload, policy, **options):
    """Gradients, buffers, and the next random number; the peak of activations."""
    model, inputs, targets = workload
    model = checkpoint_blocks(copy.deepcopy(model), policy, **options)
    torch.manual_seed(1)
    with Recorder() as record, MemoryLedger(model):
        F.cross_entropy(model(inputs).flatten(0, -2), targets).backward()
    peak = max(sample.bytes for sample in record.ranks[0].memory if sample.kind == "activations")
    return [p.grad for p in model.parameters()] + [*model.buffers(), torch.rand(2)], peak


def same(one, other):
    return all(map(torch.equal, one, other))


# --- the same bits ---


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_transformer_learns_the_same_to_the_last_bit(policy, dropout):
    assert same(step(text(dropout), "none")[0], step(text(dropout), policy)[0])


@pytest.mark.parametrize("policy", [1, 2, "sqrt", "selective"])
def test_a_residual_network_learns_the_same_to_the_last_bit(policy):
    assert same(step(image(), "none")[0], step(image(), policy)[0])


@pytest.mark.parametrize("workload", [text(0.2), text(head="token"), image()], ids=["class", "token", "image"])
def test_the_autograd_function_does_so_too(workload):
    assert same(step(workload, "none")[0], step(workload, 2, use_reentrant=True)[0])


def test_names_modules_and_copies_stay_as_they_were():
    model, inputs, targets = text(0.2)
    ours = checkpoint_blocks(copy.deepcopy(model), 2)
    assert list(ours.state_dict()) == list(model.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in model.named_modules()]
    wanted = step((model, inputs, targets), 2)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.manual_seed(1)
        with MemoryLedger(twin) as ledger:
            F.cross_entropy(twin(inputs), targets).backward()
        assert same(wanted[0][: len(list(twin.parameters()))], [p.grad for p in twin.parameters()])
        assert ledger.peak.of("activations") <= wanted[1]


def test_a_policy_takes_the_place_of_the_one_before():
    model = copy.deepcopy(text()[0])
    checkpoint_blocks(checkpoint_blocks(model, 2), 1)
    assert step((model, *text()[1:]), "none")[1] == step(text(), "none")[1]
    checkpoint_blocks(model, "none")
    assert not any("forward" in block.__dict__ for block in model.blocks)


def test_steps_that_pass_on_pairs_are_blocks_too():
    model, inputs, targets = text(0.2)

    def run(policy):
        net = copy.deepcopy(model)
        checkpoint_blocks(net.as_sequential()[1:-1], policy)
        steps = net.as_sequential()
        steps = nn.Sequential(steps[0], checkpoint_blocks(steps[1:-1], policy), steps[-1])
        torch.manual_seed(1)
        F.cross_entropy(steps(inputs), targets).backward()
        return [p.grad for p in net.parameters()]

    assert same(run("none"), run(2))


# --- the peak ---


@pytest.mark.parametrize("policy", ["none", *POLICIES], ids=str)
@pytest.mark.parametrize(("dropout", "head"), [(0.0, "class"), (0.2, "class"), (0.0, "token")])
def test_the_peak_of_a_transformer_is_what_the_formula_says(policy, dropout, head):
    classes = {"num_classes": 5} if head == "class" else {"vocab_size": 50}
    shape = {"batch_size": 4, "length": 16, "dropout": dropout > 0, **classes, **SIZES}
    told = checkpointed_transformer(groups_of(policy, 5), selective=policy == "selective", **shape)
    assert step(text(dropout, head), policy)[1] == told


@pytest.mark.parametrize("policy", ["none", 1, 2, 3, 8, [range(1, 3), range(4, 5)]], ids=str)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_peak_of_a_residual_network_is_what_the_formula_says(policy, norm):
    shape = {"batch_size": 4, "side": 16, "num_classes": 10, "norm": norm}
    for depth in (8, 18) if norm == "batch" and policy != [range(1, 3), range(4, 5)] else (18,):
        count = 3 if depth == 8 else 8
        told = checkpointed_resnet(depth, groups_of(policy, count), **shape)
        assert step(image(norm, depth), policy)[1] == pytest.approx(told, rel=0.01)  # copies of running statistics


def test_equal_layers_need_two_square_roots():
    layers = [BlockCost(border=1, inside=0, output=1)] * 100
    peaks = {k: checkpointed_peak(layers, groups_of(k, 100)) for k in (1, 2, 5, 10, 20, 50, 100)}
    assert checkpointed_peak(layers, []) == 101
    assert min(peaks, key=peaks.get) == 10 and peaks[10] == 20
    assert len(groups_of("sqrt", 100)) == 10


# --- a budget ---


def every_choice(count):
    """Every way to make checkpoints of consecutive blocks, and hold others."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *[place + 1 for place, cut in enumerate(cuts) if cut], count]
        pieces = [range(a, b) for a, b in itertools.pairwise(edges)]
        for taken in itertools.product([False, True], repeat=len(pieces)):
            yield [piece for piece, take in zip(pieces, taken, strict=True) if take]


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_within_the_budget_is_faster(seed):
    torch.manual_seed(seed)
    numbers = torch.randint(1, 20, (6, 4)).tolist()
    blocks = [BlockCost(b, i, output=n * (n % 3 > 0), seconds=s / 7) for b, i, s, n in numbers]
    for n in range(1, 6):  # one block's output is the input of the next
        blocks[n] = replace(blocks[n], border=blocks[n - 1].output or blocks[n].border)
    around = {"before": 5, "after": 9, "input_held": seed % 2 == 0}
    whole = checkpointed_peak(blocks, [], **around)
    choices = [(checkpointed_peak(blocks, groups, **around), groups) for groups in every_choice(6)]
    least = min(peak for peak, _ in choices)
    for budget in range(least, whole + 1, 7):
        groups = best_groups(blocks, budget, **around)
        assert checkpointed_peak(blocks, groups, **around) <= budget
        fastest = min(sum(blocks[i].seconds for g in one for i in g) for peak, one in choices if peak <= budget)
        assert sum(blocks[i].seconds for g in groups for i in g) == pytest.approx(fastest)
    with pytest.raises(MemoryBudgetError, match=f"need {least / 1e6:.4g} MB of activations at least"):
        best_groups(blocks, least - 1, **around)


@pytest.mark.parametrize("workload", [text(), image(depth=18)], ids=["text", "image"])
def test_measured_blocks_tell_the_peak_of_any_choice_and_the_best_keeps_to_it(workload):
    model, inputs, targets = workload
    measured = measure_blocks(copy.deepcopy(model), inputs, loss=lambda out: F.cross_entropy(out, targets), repeats=1)
    assert all(block.seconds > 0 for block in measured.blocks)
    count = len(measured.blocks)
    for policy in ("none", 1, 3, [range(1, 3)]):
        peak = step(workload, policy)[1]
        assert measured.peak(groups_of(policy, count)) == pytest.approx(peak, rel=0.01)
    budget = measured.peak([]) * 0.6
    around = {"before": measured.before, "after": measured.after, "input_held": measured.input_held}
    groups = best_groups(measured.blocks, budget, **around)
    assert groups and step(workload, groups)[1] <= budget * 1.001


# --- what a user gets wrong ---


@pytest.mark.parametrize("policy", ["all", 0, -1, True, 1.5, None])
def test_another_policy_is_refused(policy):
    with pytest.raises(ValueError, match="'none', 'sqrt', 'selective', a number of blocks, 1 or more, or a list of"):
        checkpoint_blocks(text()[0], policy)


@pytest.mark.parametrize("groups", [[range(0, 2), range(1, 3)], [range(3, 4), range(0, 1)], [range(4, 6)]])
def test_ranges_that_make_no_groups_are_refused(groups):
    with pytest.raises(ValueError, match="apart, in order, and within the 5 blocks"):
        checkpoint_blocks(text()[0], groups)


@pytest.mark.parametrize("policy", [1, 2, "sqrt"])
def test_a_block_that_comes_twice_is_refused(policy):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    with pytest.raises(ValueError, match="block 2 is block 0 once more, a Linear, and can be in one checkpoint only"):
        checkpoint_blocks(model, policy)
    assert checkpoint_blocks(model, "none")(torch.ones(1, 4)).shape == (1, 4)


def test_a_backward_hook_within_a_group_is_refused_by_its_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[1].register_full_backward_hook(lambda *_: None)
    checkpoint_blocks(model, 1)(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="Tanh number 2 of a checkpoint of 2 blocks has a backward hook"):
        checkpoint_blocks(model, 2)(torch.ones(1, 4))


def test_blocks_that_are_checkpoints_already_are_not_measured():
    model = checkpoint_blocks(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 1)
    with pytest.raises(ValueError, match="the blocks are checkpoints already"):
        measure_blocks(model, torch.ones(1, 4))


def test_a_model_whose_blocks_are_unknown_is_refused():
    with pytest.raises(ValueError, match=r"not those of Linear: give them as blocks="):
        checkpoint_blocks(nn.Linear(2, 2), 1)


def test_a_group_that_was_cut_apart_is_noticed():
    model, inputs, _ = text()
    steps = checkpoint_blocks(copy.deepcopy(model), 2).as_sequential()
    first, second = steps[:2], steps[2:]
    with pytest.raises(RuntimeError, match="cut a model into stages first"):
        second((torch.randn(4, 16, 32), inputs != 0))
    with pytest.raises(RuntimeError, match="cut a model into stages first"):
        first(inputs)[0].sum().backward()


def test_hooks_of_a_block_run_once_in_forward():
    model, inputs, targets = text()
    for policy in ("none", 1, 2):
        net, calls = checkpoint_blocks(copy.deepcopy(model), policy), []
        net.blocks[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append("before"))
        net.blocks[0].register_forward_hook(lambda *_, calls=calls: calls.append("after"))
        F.cross_entropy(net(inputs), targets).backward()
        assert calls == ["before", "after"]


def test_a_block_that_is_a_norm_itself_counts_a_batch_once():
    for policy in (1, 2):
        norms = checkpoint_blocks(nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(4)]), policy)
        norms(torch.randn(5, 3)).sin().sum().backward()
        assert [int(norm.num_batches_tracked) for norm in norms] == [1] * 4
