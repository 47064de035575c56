"""Deliberately wrong implementations: the harness catches each one, and names the mistake."""

from functools import partial

import pytest
import torch
import ways_to_average as ways

from labkit.ranks import Ranks
from labkit.verify import CASES, NotEquivalentError, assert_equivalent

sgd = partial(torch.optim.SGD, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


def mistake(ranks, way, case="plain", *, optimizer=sgd, dtype=torch.float32, **options):
    """The error for a wrong way."""
    chosen = CASES[case]
    with pytest.raises(NotEquivalentError) as caught:
        assert_equivalent(
            chosen.build, chosen.batch(), chosen.loss, way, ranks.world_size, optimizer,
            reference=chosen.reference, dtype=dtype, ranks=ranks, **options,
        )  # fmt: skip
    assert caught.value.cause is not None, str(caught.value)
    assert f"Likely cause: {caught.value.cause.sentence}." in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (ways.Sums, "summed"),
        (ways.DividesTwice, "divided twice"),
        (ways.ForgetsTheWeight, "weight"),
        (ways.NeverSynchronises, "not synchronised"),
        (ways.OnlyTheFirst, "not synchronised"),
        (ways.AveragesParameters, "averages parameters"),
        (ways.AveragesParametersAfterwards, "averages parameters"),
        (ways.BroadcastsRank0, "one rank for all"),
        (ways.CrossesData, "swapped shards"),
        (ways.SwapsShards, "swapped shards"),
        (ways.ForgetsZeroGrad, "not zeroed"),
        (ways.NeverSteps, "no step"),
        (ways.StepsDifferentlyOnRank1, "ranks disagree"),
        (ways.LosesAGradient, "no gradient"),
        (ways.ShowsAShard, "wrong shape"),
        (ways.HidesAParameter, "missing"),
    ],
)
@pytest.mark.parametrize(("optimizer", "dtype"), [(sgd, torch.float32), (adamw, torch.float64)], ids=["sgd", "adamw"])
def test_a_mistake_is_caught_and_named(two, way, name, optimizer, dtype):
    assert mistake(two, way, optimizer=optimizer, dtype=dtype).cause.name == name


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (ways.Sums, "summed"),
        (ways.NeverSynchronises, "not synchronised"),
        (ways.AveragesParameters, "averages parameters"),
        (ways.LeavesOutRank1, "a rank is missing"),
        (ways.BroadcastsRank0, "one rank for all"),
    ],
)
def test_a_mistake_is_named_on_three_ranks_with_uneven_shares(three, way, name):
    assert mistake(three, way, "uneven").cause.name == name


def test_a_mean_of_means_is_named_where_the_batch_does_not_divide(two):
    error = mistake(two, ways.MeanOfMeans, "uneven")
    assert error.cause.name == "mean of means"
    assert "3, 2 samples or tokens" in str(error)


def test_a_mean_of_means_is_named_where_ranks_have_different_numbers_of_tokens(two):
    error = mistake(two, ways.MeanOfMeans, "tied")
    assert error.cause.name == "mean of means"


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    ("way", "name"),
    [
        (ways.OnlyTheLastMicroBatch, "only the last micro-batch"),
        (ways.SynchronisesTheLastMicroBatch, "only the last micro-batch"),
    ],
)
def test_a_lost_micro_batch_is_named_told_of_or_not(two, way, name, count):
    error = mistake(two, way, micro_batches=count or 1)
    assert error.cause.name == name
    assert "last of 2 micro-batches" in str(error)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_factor_of_the_number_of_micro_batches_is_named(two, micro_batches):
    error = mistake(two, ways.ForgetsToDivideByMicroBatches, micro_batches=micro_batches)
    assert "4 times the truth" in str(error)
    assert "summed over the 4 micro-batches" in str(error) or "summed over 4 micro-batches" in str(error)


def test_a_mean_over_uneven_micro_batches_is_named(two):
    error = mistake(two, ways.MeanOfMicroBatchMeans, micro_batches=3)
    assert error.cause.name == "mean of means"


def test_the_error_shows_the_worst_parameters_by_name_and_the_ratio(two):
    text = str(mistake(two, ways.Sums))
    assert text.startswith("the gradients of step 1 differ from one process on the whole batch (2 ranks, float32):")
    row = next(line for line in text.splitlines() if line.startswith("  4.bias"))
    assert row.split()[1] == "all" and row.split()[4] == "2"
    assert "the weights after step 3 differ too" in text


def test_one_right_parameter_among_wrong_ones_is_named(two):
    assert "5 of 6 parameters; 0.weight is right" in str(mistake(two, ways.OnlyTheFirst))


def test_weights_that_are_not_broadcast_are_named_when_ranks_start_differently(two):
    error = mistake(two, ways.StartsAsItIs, start="rank0")
    assert error.kind == "start"
    assert error.cause.name == "not broadcast"


def test_buffers_that_are_not_broadcast_are_named_when_ranks_start_differently(two):
    error = mistake(two, ways.SpreadsParametersOnly, "batch norm", start="rank0")
    assert error.kind == "start_buffers"
    assert "the buffers of rank 1 at the start are not rank 0's: broadcast them at construction" in str(error)


def test_buffers_that_are_not_synchronised_are_named(two):
    error = mistake(two, ways.KeepsItsBuffers, "batch norm")
    assert error.kind == "buffers"
    assert error.cause.name == "buffers not synchronised"
    assert "1.running_mean" in str(error)


def test_a_frozen_parameter_that_changes_is_named(two):
    error = mistake(two, ways.StepsFrozen, "frozen")
    assert error.cause.name == "frozen"
    assert {one.name for one in error.differences} == {"0.weight", "2.weight"}


def test_a_gradient_where_there_should_be_none_is_named(two):
    error = mistake(two, ways.FillsUnused, "unused")
    assert error.cause.name == "gradient of an unused parameter"
    assert "never.weight" in str(error)


def test_a_tied_matrix_with_only_one_gradient_is_named(two):
    error = mistake(two, ways.AddsTheTiedOnce, "tied")
    assert "embedding.weight is tied to head.weight" in str(error)


@pytest.mark.parametrize(("case", "kind"), [("batch norm", "BatchNorm2d"), ("dropout", "Dropout")])
def test_a_model_that_needs_a_replay_is_told_of(two, case, kind):
    chosen = CASES[case]
    with pytest.raises(NotEquivalentError, match=f"1 is a {kind}, .* give reference='replay'"):
        assert_equivalent(chosen.build, chosen.batch(), chosen.loss, ways.Right, 2, sgd, ranks=two)


def test_a_search_for_the_cause_that_fails_leaves_the_difference_to_be_told(two):
    def loss(output, targets):
        if len(targets) not in (4, 8):
            raise ValueError("only whole shares, please")
        return torch.nn.functional.cross_entropy(output, targets, reduction="sum"), len(targets)

    chosen = CASES["plain"]
    with pytest.raises(NotEquivalentError, match="0.weight"):
        assert_equivalent(chosen.build, chosen.batch(), loss, ways.LosesAGradient, 2, sgd, ranks=two)
    with pytest.raises(NotEquivalentError, match="none of the known mistakes"):
        assert_equivalent(chosen.build, chosen.batch(), loss, ways.AddsNoise, 2, sgd, ranks=two)
