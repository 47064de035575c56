"""Splitting a model into stages from outside: evenly, by hand, with ties, or refused with the reason."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.mesh import clip_grad_norm_, partition_fault, placement_of
from labkit.models import resnet, transformer
from labkit.parallel.pipeline import Schedule1F1B, StepProfile, profile_steps, split_model
from labkit.parallel.pipeline.split_backward import backward_for_inputs
from labkit.ranks import Ranks
from labkit.verify import CASES


def stack(*widths):
    return nn.Sequential(*[nn.Linear(one, other) for one, other in pairwise(widths)])


def text_model(**options):
    options = {"num_classes": 5} | options if "head" not in options else options
    return transformer(vocab_size=11, d_model=16, num_layers=2, num_heads=2, max_len=6, **options)


def test_the_stages_in_turn_are_the_model():
    for model, x in (
        (text_model(), torch.randint(11, (3, 6))),
        (resnet(8, num_classes=4, norm="group"), torch.randn(2, 3, 8, 8)),
    ):
        split = split_model(model, 3)
        value = (x,)
        for stage in range(3):
            value = split.module(stage)(*value)
            value = value if isinstance(value, tuple) else (value,)
        assert torch.equal(value[0], model(x))
        names = [name for stage in range(3) for name in split.parameters(stage)]
        assert sorted(names) == sorted(dict(model.named_parameters()))


def test_parameters_are_shared_out_evenly():
    split = split_model(stack(10, 10, 10, 10, 100), 2)
    assert split.cuts == [3] and split.stage_costs == [330, 1100]
    assert "stage 1: 3 Linear (1100 parameters, 77 %)" in str(split)


def test_measured_time_is_shared_out_evenly():
    profile = [StepProfile(str(number), seconds, 2 * seconds, 1, 4) for number, seconds in enumerate([1, 1, 1, 3])]
    assert split_model(stack(2, 2, 2, 2, 2), 2, by="time", profile=profile).cuts == [3]
    measured = split_model(stack(2, 512, 512, 2), 2, by="time", example=torch.randn(64, 2))
    assert measured.unit == "s" and min(measured.costs) > 0


def test_a_profile_leaves_the_model_as_it_was():
    model = resnet(8, num_classes=4)
    before = copy.deepcopy(model.state_dict())
    found = profile_steps(list(model.as_sequential()), torch.randn(2, 3, 8, 8), repeats=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found[0].output_bytes == 4 * 2 * 16 * 8 * 8 and found[0].parameters == 3 * 16 * 9


def test_cuts_are_chosen_by_hand():
    assert split_model(stack(1, 2, 3, 4), 3, cuts=[1, 2]).cuts == [1, 2]
    for cuts in ([1], [2, 1], [0, 1], [1, 3], [1, 1]):
        with pytest.raises(ValueError, match="give 2 numbers of steps from 1 to 2"):
            split_model(stack(1, 2, 3, 4), 3, cuts=cuts)


def test_ties_are_found():
    split = split_model(text_model(head="token", causal=True), 4)
    assert list(split.tied.values()) == [(0, 3)] and "tied: embedding.token.weight on stages 0, 3" in str(split)
    assert not split_model(text_model(), 4).tied


@pytest.mark.parametrize(
    ("build", "stages", "options", "sentence"),
    [
        (CASES["tied"].build, 2, {}, "Tied is no sequence: its forward may use its parts in any order"),
        (partial(stack, 1, 2, 3), 3, {}, "has 2 steps and can't make 3 stages"),
        (partial(stack, 1, 2, 3), 2, {"by": "hand"}, "by is 'hand'"),
        (partial(stack, 1, 2, 3), 2, {"by": "time"}, "give example or profile"),
        (
            partial(stack, 1, 2, 3),
            2,
            {"sequence": [nn.Linear(1, 2), nn.Linear(2, 3)]},
            "parameters that the model lacks",
        ),
        (lambda: nn.Sequential(*[nn.BatchNorm1d(2)] * 2), 2, {}, "stages 0 and 1 share the buffer"),
    ],
)
def test_what_can_not_be_split_is_refused_with_the_reason(build, stages, options, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        split_model(build(), stages, **options)


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


def clipped(inputs, targets):
    """The norm of all gradients, and the placements."""
    torch.manual_seed(0)
    model = text_model(head="token", causal=True).double()
    split = split_model(model, 3)
    schedule = Schedule1F1B(split.stage(dist.get_rank()), 4, CASES["tokens"].loss, weighted=True)
    schedule.step(inputs, target=targets)
    parameters = split.parameters(dist.get_rank())
    norm = clip_grad_norm_(parameters.values(), 0.01)
    return norm, {name: placement_of(one) for name, one in parameters.items()}


def test_every_parameter_has_a_placement_by_which_clipping_sees_one_process(three):
    inputs, targets = CASES["tokens"].batch()
    found = three.run(clipped, inputs, targets)
    torch.manual_seed(0)
    model = text_model(head="token", causal=True).double()
    loss, weight = CASES["tokens"].loss(model(inputs), targets)
    (loss / weight).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert all(abs(one - norm) < 1e-12 for one, _ in found)
    for name, parameter in model.named_parameters():
        held = [placements[name] for _, placements in found if name in placements]
        tied = name == "embedding.token.weight"
        assert len(held) == (2 if tied else 1) and partition_fault(held[:1]) is None
        assert held[0].shape == tuple(parameter.shape)
        assert [axis.ranks for axis in held[0].tied_over] == ([(0, 2)] if tied else [])
        assert [axis.ranks for axis in held[0].sharded_over] == ([] if tied else [(0, 1, 2)])


# --- the backward in two parts ---


def used_twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


class Beside(nn.Module):
    """One of its outputs depends on weights alone, another is the input itself."""

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.layer(x), self.bias * 2, x


@pytest.mark.parametrize(
    "build",
    [
        partial(stack, 4, 5, 4),
        used_twice,
        Beside,
        lambda: nn.Sequential(nn.LayerNorm(4), nn.GELU()),
        nn.Identity,
        lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1), nn.GroupNorm(1, 3), nn.ReLU()),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    ],
)
def test_both_parts_together_are_the_backward(build):
    torch.manual_seed(0)
    model = build().double()
    whole = copy.deepcopy(model)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    outputs, others = (
        [one] if isinstance(one := m(v), torch.Tensor) else list(one) for m, v in ((model, x), (whole, again))
    )
    grads = [torch.randn_like(one) for one in outputs]
    torch.autograd.backward(others, grads)
    found, weights = backward_for_inputs(outputs, grads, [x])
    assert torch.allclose(found[0], again.grad, atol=1e-12) and all(one.grad is None for one in model.parameters())
    weights()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


def test_the_second_part_computes_nothing_again():
    """A function on the way to the input runs backward once, one beside it for the weight in the second part only."""
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            calls.append(ctx.name)
            return grad, None

    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    output = Counted.apply(x, "input") * Counted.apply(weight, "weight")
    _, weights = backward_for_inputs([Counted.apply(output, "output")], [torch.ones(3)], [x])
    assert calls == ["output", "input"]
    weights()
    assert calls == ["output", "input", "weight"] and torch.equal(weight.grad, torch.ones(3))
