"""What a shared block sends and holds is what the formulas say, and the published ones come out of the same count."""

import pytest
import torch
from tensor_ways import SEQUENCES, block_input, one_block

from labkit.memory import MemoryLedger, block_activations
from labkit.parallel import loss_parallel
from labkit.parallel.tensor.formulas import (
    BlockShape,
    block_activations_per_rank,
    block_sent,
    loss_sent,
    published_block_activations,
)
from labkit.ranks import Ranks
from labkit.record import Recorder

SHAPE = BlockShape(batch_size=3, length=8, d_model=16, num_heads=4)


@pytest.fixture(scope="module", params=[2, 4], ids="{}ranks".format)
def ranks(request):
    with Ranks(request.param, timeout=30) as ranks:
        yield ranks


def sent(ranks, sequence):
    block = one_block(SHAPE, ranks, sequence)
    x, valid = block_input(SHAPE, ranks, sequence)
    with Recorder() as forward:
        output = block(x, valid)
    with Recorder() as backward:
        output.square().sum().backward()
    return [(one.bytes_sent, one.messages, one.bytes_by("operation")) for one in (forward, backward)]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_block_sends_what_the_formula_says(ranks, sequence):
    said = block_sent(SHAPE, ranks.world_size, sequence=sequence)
    for rank, passes in enumerate(ranks.run(sent, ranks.world_size, sequence)):
        for name, (nbytes, messages, _) in zip(("forward", "backward"), passes, strict=True):
            assert nbytes == said[name].bytes[rank] and messages == said[name].messages[rank]


def test_a_block_needs_two_all_reduces_each_way_and_shards_the_same_bytes(ranks):
    n = ranks.world_size
    everything = 4 * SHAPE.elements
    whole, gathered, shards = (ranks.run(sent, n, sequence)[0] for sequence in SEQUENCES)
    assert [one[2] for one in whole] == [{"all_reduce": 2 * 2 * everything * (n - 1) // n}] * 2
    part = 2 * everything * (n - 1) // n
    for one in gathered:
        assert one[2]["all_gather_into_tensor"] == one[2]["reduce_scatter_tensor"] == part
    assert shards[0] == gathered[0]
    assert shards[1][2]["all_gather_into_tensor"] == 2 * part


def held(shape, ranks, sequence, dropout):
    block = one_block(shape, ranks, sequence, dropout)
    x, valid = block_input(shape, ranks, sequence)
    with MemoryLedger(block) as ledger:
        output = block(x, valid)
        count = ledger.now().of("activations")
    output.sum().backward()
    return count


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_block_holds_what_the_formula_says(ranks, sequence, dropout):
    for shape in (BlockShape(4, 32, 64, 4), BlockShape(2, 64, 32, 8, 48)):
        said = block_activations_per_rank(shape, ranks.world_size, sequence=sequence, dropout=bool(dropout))
        for count in ranks.run(held, shape, ranks.world_size, sequence, dropout):
            assert count == said


def test_on_one_rank_the_formula_is_that_of_the_whole_block():
    for dropout in (False, True):
        whole = block_activations(batch_size=3, length=8, d_model=16, num_heads=4, dropout=dropout)
        for sequence in SEQUENCES:
            assert block_activations_per_rank(SHAPE, 1, sequence=sequence, dropout=dropout) == whole


def test_the_published_figures_come_out_of_the_same_count():
    """Korthikanti and others (2022), Table 2, with t ranks: 34, 10 + 24/t and 34/t, and 5 a s / h (t)."""
    shape = BlockShape(batch_size=1, length=2048, d_model=6144, num_heads=64)
    sbh, scores = shape.elements, 5 * 64 * 2048 / 6144
    for t in (1, 2, 8):
        for sequence, fixed, shared in (("none", 10, 24), ("shards", 0, 34)):
            found = published_block_activations(shape, t, sequence=sequence)
            assert found == pytest.approx(sbh * (fixed + shared / t + scores / t))


def lost(targets, smoothing):
    logits = torch.randn(targets, 5, requires_grad=True)
    with Recorder() as record, loss_parallel():
        torch.nn.functional.cross_entropy(logits, torch.arange(targets) % 10, label_smoothing=smoothing).backward()
    return record.bytes_sent, record.messages


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_sends_three_or_four_numbers_a_target_and_none_in_backward(ranks, smoothing):
    said = loss_sent(30, ranks.world_size, label_smoothing=bool(smoothing))
    for rank, found in enumerate(ranks.run(lost, 30, smoothing)):
        assert found == (said.bytes[rank], said.messages[rank])
