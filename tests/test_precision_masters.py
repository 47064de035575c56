"""Master weights and Kahan summation keep updates that 16-bit weights lose."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from labkit.precision import KahanSGD, MasterWeights, kahan_add_

SMALL = 2.0**-12  # an update of 1.0 that bfloat16, with a spacing of 2^-8 below 1, can't show


def after(optimizer: Any, weight: nn.Parameter, steps: int) -> float:
    for _ in range(steps):
        optimizer.zero_grad()
        weight.grad = torch.full_like(weight, SMALL)
        optimizer.step()
    return weight.item()


def a_weight(dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.ones(1, dtype=dtype))


def test_an_update_below_half_the_spacing_is_lost_for_ever_in_bfloat16() -> None:
    weight = a_weight()
    assert after(torch.optim.SGD([weight], lr=1.0), weight, 256) == 1.0


def test_with_float32_masters_the_same_updates_arrive() -> None:
    weight = a_weight()
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    assert after(optimizer, weight, 256) == 1 - 256 * SMALL
    assert optimizer.masters[0].item() == 1 - 256 * SMALL
    assert optimizer.masters[0].dtype is torch.float32 and weight.dtype is torch.bfloat16


def test_with_kahan_summation_they_arrive_too_in_half_the_memory() -> None:
    weight = a_weight()
    optimizer = KahanSGD([weight], lr=1.0)
    assert after(optimizer, weight, 256) == 1 - 256 * SMALL
    assert optimizer.state[weight]["lost"].dtype is torch.bfloat16


def test_kahan_summation_is_exact_to_the_last_bit_of_the_total_where_a_plain_sum_stands_still() -> None:
    total, lost, plain = torch.ones(1).bfloat16(), torch.zeros(1).bfloat16(), torch.ones(1).bfloat16()
    for _ in range(1000):
        kahan_add_(total, torch.full((1,), 0.001), lost)
        plain += 0.001
    assert plain.item() == 1.0
    assert abs(total.item() - 2.0) <= 2 * torch.finfo(torch.bfloat16).eps


def test_masters_take_the_course_of_float32_training() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    start = {name: value.bfloat16() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.float() for name, value in start.items()})
    halves = nn.Linear(4, 2).bfloat16()
    halves.load_state_dict(start)
    ours = MasterWeights(halves.parameters(), torch.optim.AdamW, lr=0.01)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(20):
        for one, other in zip(halves.parameters(), model.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.float()
        ours.step()
        plain.step()
        ours.zero_grad()
    for master, half, whole in zip(ours.masters, halves.parameters(), model.parameters(), strict=True):
        assert torch.equal(master, whole)
        assert torch.equal(half, whole.bfloat16())


def test_masters_clip_schedule_and_group_as_any_optimizer() -> None:
    first, second = a_weight(), a_weight(torch.float32)
    optimizer = MasterWeights([{"params": [first], "lr": 0.5}, {"params": second}], torch.optim.SGD, lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    first.grad, second.grad = torch.ones(1).bfloat16(), torch.ones(1)
    optimizer.fetch_gradients()
    torch.nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], 0.5**0.5)
    optimizer.step()
    assert (round(first.item(), 2), round(second.item(), 2)) == (0.75, 0.5)
    schedule.step()
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.25, 0.5]


def test_micro_batches_add_up_in_the_masters() -> None:
    weight = a_weight()
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    for gradient in (1.0, SMALL):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.fetch_gradients()
        assert weight.grad is None
    optimizer.step()
    assert optimizer.masters[0].item() == -SMALL
    optimizer.zero_grad()
    assert optimizer.masters[0].grad is None


def test_a_snapshot_keeps_what_the_rounded_weights_do_not_show() -> None:
    weight = a_weight()
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=1.0, momentum=0.5)
    after(optimizer, weight, 3)
    fresh = a_weight()
    again = MasterWeights([fresh], torch.optim.SGD, lr=1.0, momentum=0.5)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.masters[0].item() == optimizer.masters[0].item() != 1.0
    assert after(again, fresh, 2) == after(optimizer, weight, 2)
    assert again.masters[0].item() == optimizer.masters[0].item()
    with pytest.raises(ValueError, match="the state has none master weights, but 1 are kept here"):
        again.load_state_dict(torch.optim.SGD([a_weight()], lr=1.0).state_dict())


def test_a_group_that_is_added_later_has_masters_too() -> None:
    first, later = a_weight(), a_weight()
    optimizer = MasterWeights([first], torch.optim.SGD, lr=1.0)
    optimizer.add_param_group({"params": later, "lr": 2.0})
    assert after(optimizer, later, 256) == 1 - 2 * 256 * SMALL
    assert len(optimizer.masters) == len(optimizer.state_dict()["masters"]) == 2


def test_what_is_no_parameter_or_comes_twice_is_refused() -> None:
    weight = a_weight()
    with pytest.raises(TypeError, match="got a tuple among the parameters; give tensors"):
        MasterWeights([("weight", weight)], torch.optim.SGD, lr=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a parameter of shape \[1\] is given twice"):
        MasterWeights([weight, weight], torch.optim.SGD, lr=1.0)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="KahanSGD: lr=-1"):
        KahanSGD([a_weight()], lr=-1)
    for optimizer in (KahanSGD([a_weight()], lr=1.0), MasterWeights([a_weight()], torch.optim.SGD, lr=1.0)):
        with pytest.raises(ValueError, match="takes no closure"):
            optimizer.step(lambda: 0)  # type: ignore[arg-type]
