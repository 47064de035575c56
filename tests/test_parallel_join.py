"""Uneven numbers of batches: those that are through take part with zeros, and all end with the same model."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.parallel import DistributedDataParallel
from labkit.ranks import RankError, Ranks
from labkit.verify import CASES


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param, timeout=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout=20) as ranks:
        yield ranks


def batches_of(rank, counts):
    """Batches [8, 3, 8, 8], as many as `counts` says for the rank."""
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 3, 8, 8, generator=random) for _ in range(counts[rank])]


def model(case):
    torch.manual_seed(0)
    return CASES[case].build()


def train(case, counts, options):
    """Weights and statistics after all batches, by SGD on a loss that divides by the world size and what is there."""
    module = model(case)
    wrapper = DistributedDataParallel(module, **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    with wrapper.join():
        for batch in batches_of(dist.get_rank(), counts):
            optimizer.zero_grad()
            wrapper(batch).square().mean().backward()
            optimizer.step()
    return {name: value.clone() for name, value in module.state_dict().items()}


def train_in_one_process(case, counts):
    """The same, rank after rank in each step: a rank that is through adds nothing, and is divided by all the same."""
    module, size = model(case), len(counts)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    shares = [batches_of(rank, counts) for rank in range(size)]
    for step in range(max(counts)):
        optimizer.zero_grad()
        start = {name: buffer.clone() for name, buffer in module.named_buffers()}
        kept = None
        for batches in shares:
            if step < len(batches):
                for name, buffer in module.named_buffers():
                    buffer.copy_(start[name])
                (module(batches[step]).square().mean() / size).backward()
                # a rank's statistics are the next step's for the first rank, and all take them
                kept = kept or {name: buffer.clone() for name, buffer in module.named_buffers()}
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize("counts", [(3, 3, 3), (3, 1, 2), (4, 0, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-3}], ids=str)
@pytest.mark.parametrize("case", ["image", "batch norm"])
def test_ranks_may_run_out_of_batches_at_different_times(ranks, counts, options, case):
    counts = counts[: ranks.world_size]
    expected = train_in_one_process(case, counts)
    for state in ranks.run(train, case, counts, options):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("first", [(0, 2, 1), (1, 2, 3)], ids=str)
def test_where_the_first_rank_is_through_first_all_take_the_model_of_one_that_trained_on(ranks, first):
    counts = first[: ranks.world_size]
    states = ranks.run(train, "image", counts, {})
    expected = train_in_one_process("image", counts) if max(counts) else None
    for state in states:
        for name, value in (expected or states[0]).items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def line():
    module = nn.Linear(1, 1)
    nn.init.zeros_(module.weight)
    return DistributedDataParallel(module), module.weight


def x(value):
    return torch.full((1, 1), float(value))


@pytest.mark.parametrize("way", ["accumulated", "two forwards", "a penalty first", "evaluated"])
def test_whatever_a_step_is_made_of(two, way):
    """Rank 0 trains two steps, rank 1 one; the gradient of rank 0's second step is halved."""

    def run():
        wrapper, weight = line()
        steps = 2 - dist.get_rank()
        with wrapper.join():
            for _ in range(steps):
                wrapper.zero_grad()
                if way == "accumulated":
                    with wrapper.no_sync():
                        wrapper(x(1)).backward()
                    wrapper(x(3)).backward()
                elif way == "two forwards":
                    (wrapper(x(1)) + wrapper(x(3))).backward()
                elif way == "a penalty first":
                    point = x(4).requires_grad_()
                    output = wrapper(point)
                    torch.autograd.grad(output, point, create_graph=True)
                    output.backward()
                else:
                    wrapper(x(4)).backward()
                    with torch.no_grad():
                        wrapper(x(7))
        return weight.grad.item()

    assert two.run(run)[0] == 2.0


def test_an_error_inside_ends_all_with_its_cause(two):
    def run():
        wrapper, _ = line()
        with wrapper.join():
            wrapper(x(1)).backward()
            if dist.get_rank() == 1:
                raise LookupError("a broken file")
            wrapper(x(1)).backward()

    with pytest.raises(RankError, match="rank 1.*a broken file"):
        two.run(run)


def test_ranks_that_do_different_things_are_told(two):
    def run():
        module = CASES["batch norm"].build()
        wrapper = DistributedDataParallel(module)
        batch = torch.randn(2, 3, 8, 8)
        with wrapper.join():
            output = wrapper(batch)
            if dist.get_rank() == 0:
                output.sum().backward()
            wrapper(batch)

    with pytest.raises(RankError, match="of 2 ranks with batches left 1 begin a forward and 1 a backward"):
        two.run(run)


def test_join_inside_join_is_refused(two):
    def run():
        wrapper, _ = line()
        with wrapper.join(), wrapper.join():
            pass

    with pytest.raises(RankError, match="is in a join\\(\\) already; leave it first"):
        two.run(run)


def test_after_an_error_outside_of_any_collective_join_can_be_entered_again(two):
    def run():
        wrapper, weight = line()
        with contextlib.suppress(LookupError), wrapper.join():
            raise LookupError
        with wrapper.join():
            wrapper(x(1)).backward()
        return weight.grad.item()

    assert two.run(run) == [1.0, 1.0]


def test_a_module_that_normalises_over_all_ranks_is_refused(two):
    def run():
        from labkit.parallel.synchronised_norm import SyncBatchNorm

        wrapper = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2)))
        wrapper.join()

    with pytest.raises(RankError, match="join: 1 normalises over all ranks, and one that is through can't take part"):
        two.run(run)
