"""Sharing out layers changes where numbers are, not what they are: outputs, gradients and steps equal one process."""

from functools import partial

import pytest
import torch
from tensor_ways import (
    SEQUENCES,
    Tensor,
    adamw,
    bottleneck,
    bottleneck_plan,
    classifier,
    document_batch,
    images,
    picture_batch,
    predictor,
    sgd,
    token_batch,
)

from labkit.ranks import Ranks
from labkit.verify import assert_equivalent
from labkit.verify.awkward import classes_loss, tokens_loss


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{}ranks".format)
def ranks(request):
    with Ranks(request.param, timeout=60) as ranks:
        yield ranks


def equivalent(ranks, build, batch, loss, optimizer=sgd, dtype=torch.float32, steps=3, **options):
    return assert_equivalent(
        build, batch, loss, partial(Tensor, **options), ranks.world_size, optimizer, dtype=dtype, ranks=ranks,
        start="rank0", steps=steps,
    )  # fmt: skip


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_classifier_trains_as_in_one_process(ranks, sequence):
    build = partial(classifier, ranks.world_size)
    found = equivalent(ranks, build, document_batch(), classes_loss, adamw, torch.float64, sequence=sequence)
    assert found.identical and found.errors["first_gradients"] < 1e-12
    equivalent(ranks, build, document_batch(), classes_loss, sequence=sequence)


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("sharded", [True, False], ids=["loss_parallel", "gathered"])
def test_a_tied_token_model_trains_as_in_one_process(ranks, sequence, sharded):
    """Its vocabulary of 11 does not divide."""
    if not sharded and (ranks.world_size in (1, 4) or sequence == "gathered"):
        pytest.skip("two and three ranks show it")
    build, options = partial(predictor, ranks.world_size), {"sequence": sequence, "sharded_logits": sharded}
    found = equivalent(ranks, build, token_batch(), tokens_loss, adamw, torch.float64, sharded=sharded, **options)
    assert found.identical and found.errors["first_gradients"] < 1e-12


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_convolutions_by_channels_train_as_in_one_process(ranks, norm):
    """Three ranks don't divide the channels; the groups they must divide."""
    if ranks.world_size == 3 and norm == "group":
        pytest.skip("refused")
    equivalent(ranks, partial(images, 8, norm), picture_batch(), classes_loss, sgd, torch.float64)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_block_of_three_convolutions_trains_as_in_one_process(ranks, norm):
    """The sum in its middle is scattered over the channels."""
    if ranks.world_size == 3 and norm == "group":
        pytest.skip("refused")
    equivalent(
        ranks, partial(bottleneck, norm), picture_batch(), classes_loss, sgd, torch.float64, plan=bottleneck_plan()
    )
