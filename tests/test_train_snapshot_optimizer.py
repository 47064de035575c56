"""An optimizer's state goes through a snapshot to the last bit, for every torch optimizer and into any other layout."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_groups import new_group
from torch import nn, optim

from labkit.mesh import FlatPart, Placement, place
from labkit.ranks import Ranks
from labkit.train.snapshots import (
    SnapshotError,
    latest_snapshot,
    load_module,
    load_optimizer,
    module_tensors,
    optimizer_tensors,
    save_snapshot,
)

Build = Callable[[Any], optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)).to(
        memory_format=torch.channels_last
    )


def steps(model: nn.Module, optimizer: optim.Optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(5, 2, 6, 6, generator=generator)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "build",
    [
        lambda p: optim.SGD(p, 0.01),
        lambda p: optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
        lambda p: optim.Adam(p, 0.01, amsgrad=True),
        lambda p: optim.AdamW(p, 0.01, betas=(0.8, 0.99)),
        lambda p: optim.AdamW(p, torch.tensor(0.01), fused=True),
        lambda p: optim.Adagrad(p, 0.01),
        lambda p: optim.Adadelta(p, 0.1),
        lambda p: optim.Adamax(p, 0.01),
        lambda p: optim.NAdam(p, 0.01),
        lambda p: optim.RAdam(p, 0.01),
        lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
        lambda p: optim.Rprop(p, 0.01),
        lambda p: optim.ASGD(p, 0.01),
        lambda p: optim.Adafactor(p, 0.01),
    ],
)
def test_a_run_goes_on_to_the_last_bit(tmp_path: Path, build: Build) -> None:
    model = network()
    optimizer = build(model.parameters())
    steps(model, optimizer, 3, seed=1)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    moments, settings = optimizer_tensors(optimizer, dict(model.named_parameters()))
    save_snapshot(tmp_path, 3, tensors=module_tensors(model) | moments, state={"optimizer": settings})
    steps(model, optimizer, 3, seed=2)

    again = network()
    resumed = build(again.parameters())
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None
    load_module(again, snapshot)
    load_optimizer(resumed, dict(again.named_parameters()), snapshot, snapshot.state["optimizer"])
    for old, new in zip(optimizer.param_groups, resumed.param_groups, strict=True):
        assert {key: value for key, value in old.items() if key != "params"} == {
            key: value for key, value in new.items() if key != "params"
        }
    steps(again, resumed, 3, seed=2)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {type(value) for state in resumed.state.values() for value in state.values() if value is not None} == {
        type(value) for state in optimizer.state.values() for value in state.values() if value is not None
    }


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=30) as ranks:
        yield ranks


SIZES = {"first": (7, 3), "second": (5,), "third": (2, 2, 3)}


def full_values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SIZES.items()}


def flat_shard(group: dist.ProcessGroup) -> tuple[nn.Parameter, dict[str, FlatPart], Callable[[int], None]]:
    """All values in one flat vector, padded and cut into equal shards over the group; this rank's shard and parts."""
    world, place_in_group = dist.get_world_size(group), dist.get_rank(group)
    total = sum(value.numel() for value in full_values(0).values())
    each = -(-total // world)
    start, stop = place_in_group * each, min(total, (place_in_group + 1) * each)
    shard = nn.Parameter(torch.zeros(each))

    def fill(target: torch.Tensor, seed: int) -> None:
        flat = torch.cat([value.flatten() for value in full_values(seed).values()])
        target[: stop - start] = flat[start:stop]

    fill(shard.data, 0)
    parts, begin = {}, 0
    for name, value in full_values(0).items():
        low, high = max(start, begin), min(stop, begin + value.numel())
        if low < high:
            held = Placement.of(value).sharded_flat(low - begin, high - begin, group)
            parts[name] = FlatPart(shard, low - start, held)
        begin += value.numel()

    def gradient(seed: int) -> None:
        shard.grad = torch.zeros(each)
        fill(shard.grad, seed)

    return shard, parts, gradient


def step_in_flat_shards(folder: str, ranks: int, resume: bool) -> Any:
    """AdamW on the first `ranks` ranks: three steps and a snapshot, or from the snapshot three steps more."""
    groups = [new_group(range(size)) for size in range(1, 5)]
    if dist.get_rank() >= ranks:
        return None
    group = groups[ranks - 1]
    shard, parts, gradient = flat_shard(group)
    optimizer = optim.AdamW([shard], 0.1)
    weights = {name: (shard.data[p.start : p.start + p.placement.numel].view(p.placement.local_shape), p.placement)
               for name, p in parts.items()}  # fmt: skip
    if resume:
        snapshot = latest_snapshot(folder, group=group)
        assert snapshot is not None
        for name, (view, placement) in weights.items():
            view.copy_(snapshot.read(name, placement))
        load_optimizer(optimizer, parts, snapshot, snapshot.state)
    for seed in range(4, 7) if resume else range(1, 4):
        gradient(seed)
        optimizer.step()
    if not resume:
        moments, settings = optimizer_tensors(optimizer, parts)
        save_snapshot(folder, 3, tensors=weights | moments, state=settings, group=group)
    return {name: (placement, view.clone()) for name, (view, placement) in weights.items()}


def one_process(count: int) -> dict[str, nn.Parameter]:
    parameters = {name: nn.Parameter(value) for name, value in full_values(0).items()}
    optimizer = optim.AdamW(parameters.values(), 0.1)
    for seed in range(1, count + 1):
        for name, value in full_values(seed).items():
            parameters[name].grad = value
        optimizer.step()
    return parameters


@pytest.mark.parametrize(("saving", "resuming"), [(4, 3), (3, 4), (4, 1), (1, 2)])
def test_flat_shards_of_one_world_size_resume_at_another(
    four: Ranks, tmp_path: Path, saving: int, resuming: int
) -> None:
    four.run(step_in_flat_shards, str(tmp_path), saving, False)
    answers = four.run(step_in_flat_shards, str(tmp_path), resuming, True)
    truth = one_process(6)
    found = {name: torch.full(shape, float("nan")) for name, shape in SIZES.items()}
    for answer in answers[:resuming]:
        for name, (placement, piece) in answer.items():
            placement.put(found[name], piece)
    for name, value in found.items():
        assert torch.equal(value, truth[name].data)


def test_flat_shards_resume_in_one_plain_process_moments_included(four: Ranks, tmp_path: Path) -> None:
    four.run(step_in_flat_shards, str(tmp_path), 4, False)
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None
    parameters = {name: nn.Parameter(snapshot.read(name)) for name in SIZES}
    optimizer = optim.AdamW(parameters.values(), 99.0)
    load_optimizer(optimizer, parameters, snapshot, snapshot.state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for seed in range(4, 7):
        for name, value in full_values(seed).items():
            parameters[name].grad = value
        optimizer.step()
    truth = one_process(6)
    assert all(torch.equal(parameters[name], truth[name]) for name in SIZES)


def test_another_optimizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    model = network()
    moments, settings = optimizer_tensors(optim.Adam(model.parameters()), dict(model.named_parameters()))
    assert moments == {}  # before the first step there is none
    save_snapshot(tmp_path, 1, tensors=module_tensors(model), state=settings)
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None
    with pytest.raises(SnapshotError, match="has Adam with 1 groups of parameters, not SGD with 1: build the same"):
        load_optimizer(optim.SGD(model.parameters(), 0.1), dict(model.named_parameters()), snapshot, settings)


def test_state_that_can_not_be_cut_is_refused_in_one_sentence() -> None:
    parameter = nn.Parameter(torch.zeros(4, 6))
    optimizer = optim.Adafactor([parameter])
    parameter.grad = torch.ones(4, 6)
    optimizer.step()
    assert optimizer_tensors(optimizer, {"w": parameter})[0]
    place(parameter, Placement((8, 6), torch.float32, ((0, 4), (0, 6))))
    with pytest.raises(SnapshotError, match=r"state 'row_var' of 'w' is \[4, 1\], the piece is \[4, 6\]: it can't be"):
        optimizer_tensors(optimizer, {"w": parameter})
    optimizer.state[parameter] = {"history": [1, 2]}
    with pytest.raises(SnapshotError, match="state 'history' of 'w' is a list: only tensors and numbers can be kept"):
        optimizer_tensors(optimizer, {"w": parameter})
