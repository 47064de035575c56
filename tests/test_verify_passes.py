"""Right implementations pass, at every world size and on every awkward model; wrong calls are refused in a sentence."""

from functools import partial

import pytest
import torch
import ways_to_average as ways
from torch import nn

from labkit.ranks import Ranks
from labkit.verify import CASES, assert_equivalent

sgd = partial(torch.optim.SGD, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


def equivalent(ranks, way, case, optimizer=sgd, dtype=torch.float32, **options):
    chosen = CASES[case]
    return assert_equivalent(
        chosen.build, chosen.batch(), chosen.loss, way, ranks.world_size, optimizer,
        reference=chosen.reference, dtype=dtype, ranks=ranks, **options,
    )  # fmt: skip


def torch_wrapper(module, loss, optimizer):
    return nn.parallel.DistributedDataParallel(module)


def torch_wrapper_with_unused(module, loss, optimizer):
    return nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)


def zero_of_torch(module, loss, optimizer):
    wrapped = nn.parallel.DistributedDataParallel(module)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01)


@pytest.mark.parametrize("case", CASES)
def test_averaging_gradients_equals_one_process(ranks, case):
    shown = equivalent(ranks, ways.Right, case, start="rank0")
    assert shown.errors["weights"] < 1e-6
    assert shown.identical
    assert equivalent(ranks, ways.Right, case, adamw, torch.float64).identical


@pytest.mark.parametrize("case", CASES)
def test_a_wrapped_module_is_given_its_share_by_the_harness(two, case):
    wrapper = torch_wrapper_with_unused if CASES[case].unused else torch_wrapper
    equivalent(two, wrapper, case, start="rank0")


def test_an_optimizer_may_come_with_the_module(two):
    equivalent(two, zero_of_torch, "plain", adamw, torch.float64)


def test_fifty_steps_of_sgd_stay_together(two):
    assert equivalent(two, ways.Right, "tied", dtype=torch.float64, steps=50).errors["weights"] < 1e-12


@pytest.mark.parametrize("case", ["plain", "dropout", "batch norm"])
def test_micro_batches_are_replayed_with_their_own_masks_and_statistics(two, case):
    equivalent(two, ways.InMicroBatches, case, micro_batches=2)


def test_a_module_that_is_copied_rather_than_built_gets_the_dtype(two):
    module = CASES["plain"].build()
    inputs, targets = CASES["plain"].batch()
    assert_equivalent(
        lambda: module, (inputs, targets), CASES["plain"].loss, ways.Right, 2, sgd, dtype=torch.float64, ranks=two
    )


def test_the_caller_keeps_its_random_numbers_and_dtype(two):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    equivalent(two, ways.Right, "plain", dtype=torch.float64)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_default_dtype() == torch.float32


def test_functions_of_a_notebook_travel_to_ranks_that_the_harness_starts():
    def build():
        return nn.Linear(3, 2)

    def loss(output, targets):
        return ((output - targets) ** 2).sum(), targets.numel()

    inputs, targets = torch.randn(5, 3), torch.randn(5, 2)
    shown = assert_equivalent(build, (inputs, targets), loss, lambda m, _l, _o: torch_wrapper(m, _l, _o), 2, sgd)
    assert "equal to one process (2 ranks, float32, 3 steps)" in str(shown)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reference": "both"}, "reference is 'both'; give 'whole' or 'replay'"),
        ({"dtype": torch.float16}, "give torch.float32 or torch.float64"),
        ({"steps": 0}, "steps is 0; give 1 or more"),
        ({"shares": [1, 2]}, "give 2 numbers of rows that add up to the batch's 8"),
        ({"start": "random"}, "give 'same' or 'rank0'"),
    ],
)
def test_a_wrong_call_is_refused_before_any_rank_starts(options, words):
    chosen = CASES["plain"]
    with pytest.raises(ValueError, match=words):
        assert_equivalent(chosen.build, chosen.batch(), chosen.loss, ways.Right, 2, sgd, **options)


def test_an_object_that_is_no_parallel_form_is_refused(two):
    with pytest.raises(RuntimeError, match="parallelize\\(\\) must return a wrapped module"):
        equivalent(two, lambda module, loss, optimizer: None, "plain")
