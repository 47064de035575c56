"""`GradScaler`: PyTorch's, step by step; nothing of a skipped step is left; ranks skip together."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from rank_groups import new_group
from torch import nn

from labkit.mesh import clip_grad_norm_, init_device_mesh
from labkit.precision import GradScaler, MasterWeights
from labkit.ranks import Ranks
from labkit.record import Recorder


def a_parameter(*gradient: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(len(gradient)))
    parameter.grad = torch.tensor(gradient)
    return parameter


def scaled(scaler: GradScaler) -> GradScaler:
    scaler.scale(torch.ones(()))
    return scaler


# --- the course of the scale ---


@pytest.mark.parametrize("settings", [{}, {"growth_factor": 1.7, "backoff_factor": 0.3, "init_scale": 777.7}])
def test_the_scale_takes_pytorchs_course_over_5000_steps(settings: dict[str, float]) -> None:
    ours = GradScaler(growth_interval=20, **settings)  # type: ignore[arg-type]
    theirs = torch.amp.GradScaler("cpu", growth_interval=20, **settings)  # type: ignore[arg-type]
    scalers = (ours, theirs)
    parameters = [nn.Parameter(torch.ones(3)) for _ in scalers]
    optimizers = [torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in parameters]
    generator = torch.Generator().manual_seed(0)
    overflows = 0
    for step in range(5000):
        slope = torch.randn(3, generator=generator)
        if torch.rand((), generator=generator) < 0.03:
            slope[step % 3] = (math.inf, -math.inf, math.nan)[step % 3]
            overflows += 1
        for scaler, parameter, optimizer in zip(scalers, parameters, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale((parameter * slope).sum()).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert ours.state_dict() == theirs.state_dict(), f"step {step}"
        assert torch.equal(*parameters), f"step {step}"
    assert overflows > 100


def test_the_scale_stops_growing_at_the_largest_float32() -> None:
    scaler, optimizer = GradScaler(init_scale=2.0**127, growth_interval=1), torch.optim.SGD([a_parameter(1.0)], lr=0.1)
    scaled(scaler).step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_gradients_that_stay_infinite_end_in_a_sentence() -> None:
    scaler = GradScaler(init_scale=1e-30, backoff_factor=1e-30)
    scaled(scaler).step(torch.optim.SGD([a_parameter(math.nan)], lr=0.1))
    with pytest.raises(RuntimeError, match="at every scale down to the smallest number: look for"):
        scaler.update()


def test_its_state_passes_between_ours_and_pytorchs() -> None:
    ours = GradScaler(init_scale=4.0, growth_interval=3)
    scaled(ours).step(torch.optim.SGD([a_parameter(1.0)], lr=0.1))
    ours.update()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    again = GradScaler()
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == theirs.state_dict() == ours.state_dict() == {
        "scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 1
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="the state is empty"):
        again.load_state_dict({})


# --- one step ---


def test_gradients_are_divided_before_the_step_and_before_clipping() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    scaler, optimizer = GradScaler(init_scale=1024.0), torch.optim.SGD([parameter], lr=1.0)
    scaler.scale((parameter**2).sum() / 2).backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [3 * 1024, 4 * 1024]
    scaler.unscale_(optimizer)
    assert clip_grad_norm_([parameter], 1.0).item() == 5.0
    scaler.step(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.tensor([3.0 - 0.6, 4.0 - 0.8]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_skipped_step_leaves_weights_and_optimizer_as_they_were(bad: float) -> None:
    parameter = a_parameter(1.0, 1.0)
    scaler, optimizer = GradScaler(), torch.optim.AdamW([parameter], lr=0.1)
    scaled(scaler).step(optimizer)
    scaler.update()
    before = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
    parameter.grad = torch.tensor([1.0, bad])
    assert scaled(scaler).step(optimizer) is None
    assert scaler.found_inf(optimizer)
    after = optimizer.state_dict()
    assert torch.equal(parameter, before[1])
    for name, value in before[0]["state"][0].items():
        assert torch.equal(after["state"][0][name], value), name
    scaler.update()
    assert scaler.get_scale() == 2.0**15


def test_a_sum_that_would_overflow_is_no_infinity() -> None:
    parameter = a_parameter(3e38, 3e38)
    scaler, optimizer = GradScaler(), torch.optim.SGD([parameter], lr=0.0)
    scaled(scaler).step(optimizer)
    assert not scaler.found_inf(optimizer)


def test_of_two_optimizers_only_the_one_with_an_infinity_skips_and_the_scale_shrinks() -> None:
    good, bad = a_parameter(65536.0), a_parameter(math.inf)
    scaler, optimizers = GradScaler(), [torch.optim.SGD([one], lr=1.0) for one in (good, bad)]
    for optimizer in optimizers:
        scaled(scaler).step(optimizer)
    scaler.update()
    assert (good.item(), bad.item(), scaler.get_scale()) == (0.0, 1.0, 2.0**15)


def test_a_16_bit_loss_is_scaled_in_float32() -> None:
    loss = torch.tensor(3.0, dtype=torch.float16)
    assert GradScaler().scale(loss).item() == 3 * 65536
    assert [one.item() for one in GradScaler(init_scale=2.0).scale([loss, loss])] == [6, 6]


def test_disabled_it_does_nothing() -> None:
    parameter, loss = a_parameter(math.inf), torch.ones(())
    scaler, optimizer = GradScaler(enabled=False), torch.optim.SGD([parameter], lr=1.0)
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == -math.inf


def test_gradients_of_master_weights_are_fetched_and_unscaled_in_float32() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    scaler = GradScaler(init_scale=2.0**16)
    weight.grad = torch.tensor([1.0], dtype=torch.float16)  # 2^-16 unscaled: in float16 a subnormal with 8 bits left
    scaled(scaler).unscale_(optimizer)
    assert optimizer.masters[0].grad is not None and optimizer.masters[0].grad.item() == 2.0**-16
    scaler.step(optimizer)
    assert optimizer.masters[0].item() == 1 - 2.0**-16


# --- what is out of order ---


def twice_unscaled(scaler: GradScaler, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscaled_late(scaler: GradScaler, optimizer: Any) -> None:
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def twice_stepped(scaler: GradScaler, optimizer: Any) -> None:
    scaler.step(optimizer)
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (twice_unscaled, "unscale_: called twice for this optimizer since the last update"),
        (unscaled_late, "unscale_: this optimizer has stepped already; unscale before step"),
        (twice_stepped, "step: called twice for this optimizer since the last update"),
        (lambda scaler, _: scaler.update(), "update: no optimizer has stepped since the last update"),
        (lambda scaler, one: scaler.step(one, lambda: 0), "a closure would compute gradients that are never unscaled"),
    ],
)
def test_what_is_out_of_order_is_refused(do: Callable[[GradScaler, Any], None], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        do(scaled(GradScaler()), torch.optim.SGD([a_parameter(1.0)], lr=0.1))


def test_a_step_without_a_scaled_loss_is_refused_in_every_turn() -> None:
    scaler, optimizer = GradScaler(), torch.optim.SGD([a_parameter(1.0)], lr=0.1)
    with pytest.raises(RuntimeError, match="step: no loss was scaled since the last update"):
        scaler.step(optimizer)
    scaled(scaler).step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="unscale_: no loss was scaled since the last update"):
        scaler.unscale_(optimizer)


def test_a_forgotten_backward_is_refused_as_by_pytorch() -> None:
    scaler, weight = GradScaler(), nn.Parameter(torch.ones(1))
    scaler.scale(weight.sum())
    with pytest.raises(RuntimeError, match="none of the optimizer's parameters has a gradient; call backward"):
        scaler.step(torch.optim.SGD([weight], lr=0.1))


def test_a_tuple_with_names_is_scaled_too() -> None:
    class Losses(NamedTuple):
        head: torch.Tensor
        tail: torch.Tensor

    assert GradScaler(init_scale=4.0).scale(Losses(torch.ones(()), torch.ones(()))).tail == 4.0


def test_float16_gradients_and_bad_settings_are_refused() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    weight.grad = torch.ones(1, dtype=torch.float16)
    with pytest.raises(ValueError, match="a gradient is float16 and would underflow"):
        scaled(GradScaler()).step(torch.optim.SGD([weight], lr=0.1))
    for name, value in (("init_scale", 0.0), ("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_interval", 0)):
        with pytest.raises(ValueError, match=f"GradScaler: {name} is {value!r}; give"):
            GradScaler(**{name: value})  # type: ignore[arg-type]
    # float32 would make nothing of the first, infinity of the second
    unusable: tuple[Any, ...] = (1e-50, 1e39, math.nan, "large")
    for scale in unusable:
        with pytest.raises(ValueError, match="init_scale is .*; give a number above 0 that float32 can hold"):
            GradScaler(init_scale=scale)
    with pytest.raises(ValueError, match=r"device is 1024\.0; give 'cpu' or 'cuda', and the scale as init_scale"):
        GradScaler(1024.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the state has no 'growth_factor'"):
        GradScaler().load_state_dict({"scale": 2.0})
    with pytest.raises(TypeError, match="give a tensor, or a list or tuple of tensors"):
        GradScaler().scale("loss")


# --- on ranks ---


def one_overflows(of: str) -> tuple[bool, float, float, int, int]:
    import torch.distributed as dist

    groups: dict[str, list[Any]] = {"world": [None], "mine": [], "both": [None, None]}
    if of == "axis":
        groups["axis"] = [init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["tp"]]
    if of == "alone":
        alone = [new_group([rank]) for rank in range(2)]
        groups["alone"] = [alone[dist.get_rank()]]
    parameter = a_parameter(1.0, math.inf if dist.get_rank() == 1 else 1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = scaled(GradScaler(groups=groups[of]))
    with Recorder() as record:
        scaler.step(optimizer)
    skipped = scaler.found_inf(optimizer)
    scaler.update()
    mine = record.ranks[0]
    return skipped, scaler.get_scale(), parameter[0].item(), record.bytes_sent, mine.control_messages


@pytest.mark.parametrize("of", ["world", "axis", "both"])
def test_an_overflow_on_one_rank_makes_all_of_its_group_skip(two: Ranks, of: str) -> None:
    for skipped, scale, weight, nbytes, _ in two.run(one_overflows, of):
        assert (skipped, scale, weight) == (True, 2.0**15, 1.0)
        assert nbytes == 0  # control traffic is counted apart


@pytest.mark.parametrize("of", ["mine", "alone"])
def test_without_a_group_each_rank_decides_for_itself(two: Ranks, of: str) -> None:
    first, second = two.run(one_overflows, of)
    assert (first[0], second[0]) == (False, True)


def a_rank_without_a_loss() -> tuple[bool, float]:
    import torch.distributed as dist

    parameter = a_parameter(65536.0)
    scaler, optimizer = GradScaler(groups=[None]), torch.optim.SGD([parameter], lr=1.0)
    if dist.get_rank() == 1:
        scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.found_inf(optimizer), parameter.item()


def test_a_stage_that_holds_no_loss_steps_with_the_others(two: Ranks) -> None:
    assert two.run(a_rank_without_a_loss) == [(False, 0.0)] * 2
