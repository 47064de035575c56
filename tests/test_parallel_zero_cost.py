"""What ZeRO sends and holds is what the formulas say, to the byte; padding is what the layout says."""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from zero_ways import adamw, prepared, wide

from labkit.bench.zero_bench import bytes_on_the_wire, ours, theirs
from labkit.memory import MemoryBudgetError, MemoryLedger
from labkit.parallel.zero import FLOAT32, MIXED, peak_of_step, sent_per_step, state_per_rank, watch
from labkit.parallel.zero.layout import FlatLayout
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder

WIDTH, LAYERS = 64, 3
LAYER = WIDTH * WIDTH + WIDTH  # its elements


@pytest.fixture(scope="module", params=[2, 3], ids="{}ranks".format)
def ranks(request):
    with Ranks(request.param, timeout=30) as ranks:
        yield ranks


def padded(elements, ranks):
    return -(-elements // ranks) * ranks


def a_step(network, optimizer, rows=4, dtype=torch.float32):
    torch.manual_seed(dist.get_rank())
    optimizer.zero_grad()
    network(torch.randn(rows, WIDTH, dtype=dtype)).square().sum().backward()


# --- bytes ---


def sent(stage, steps, **options):
    network, optimizer = prepared(wide(WIDTH, LAYERS), adamw, stage, **options)
    a_step(network, optimizer)
    optimizer.step()
    with Recorder() as record:
        for _ in range(steps):
            a_step(network, optimizer)
            optimizer.step()
    return record.bytes_sent, record.bytes_by("operation")


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_send_as_much_as_data_parallel(ranks, stage):
    """2 P (N - 1) / N elements: half in reduce-scatters, half in all-gathers; one bucket, padded to N."""
    elements = padded(LAYERS * LAYER, ranks.world_size)
    for nbytes, by in ranks.run(sent, stage, 2):
        assert nbytes == 2 * 4 * sent_per_step(stage, elements, ranks.world_size)
        assert by["reduce_scatter_tensor"] == by["all_gather_into_tensor"] == nbytes // 2
    plain = ranks.run(sent, 0, 2)
    assert sum(nbytes for nbytes, _ in plain) == 2 * 4 * ranks.world_size * sent_per_step(
        0, LAYERS * LAYER, ranks.world_size
    )


@pytest.mark.parametrize(("options", "times"), [({}, 3), ({"reshard_after_forward": False}, 2)], ids=str)
def test_stage_3_sends_half_as_much_again_unless_it_keeps_the_parameters(ranks, options, times):
    """3 P (N - 1) / N, the root unit included; each unit padded to N."""
    n = ranks.world_size
    units = [padded(LAYER, n)] * LAYERS
    expected = 2 * 4 * sum(sent_per_step(3, unit, n, reshard_after_forward=not options) for unit in units)
    assert expected == 2 * 4 * times * sum(units) * (n - 1) // n
    for nbytes, by in ranks.run(sent, 3, 2, **options):
        assert nbytes == expected
        assert by["reduce_scatter_tensor"] == expected // times


def test_a_root_that_keeps_its_parameters_gathers_them_once(two):
    """With None instead of True: the root's own, here those of the first layer, are not freed before backward."""
    nbytes, _ = two.run(sent, 3, 1, reshard_after_forward=None)[0]
    assert nbytes == 4 * (2 * LAYER + 3 * (LAYERS - 1) * LAYER) // 2


@pytest.mark.parametrize(("stage", "under_no_sync", "reductions"), [(1, True, 1), (2, True, 1), (2, False, 3)])
def test_accumulating_costs_one_reduction_under_no_sync_and_one_each_without(two, stage, under_no_sync, reductions):
    def run():
        network, optimizer = prepared(wide(WIDTH, LAYERS), adamw, stage)
        inside = 2 if under_no_sync else 0
        with Recorder() as record:
            for number in range(3):
                if number < inside:
                    with optimizer.no_sync():
                        network(torch.randn(4, WIDTH)).sum().backward()
                else:
                    network(torch.randn(4, WIDTH)).sum().backward()
        gradients = sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in optimizer.gradients()}.values()
        )
        return record.bytes_sent, gradients

    nbytes, gradients = two.run(run)[0]
    assert nbytes == reductions * 4 * LAYERS * LAYER // 2
    # what it leaves: whole gradients in stage 1, a shard in stage 2
    assert gradients == 4 * LAYERS * LAYER // (1 if stage == 1 else 2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has loopback counters in /proc")
def test_pytorchs_stage_1_sends_half_as_much_again(two):
    """By the kernel's count: its wrapper all-reduces whole gradients, and then stepped parameters are broadcast."""
    elements = 8 * 512 * 513

    def workload():
        return wide(512, 8), torch.randn(2, 512), torch.randint(512, (2,))

    def least(way, expected):  # other programs only ever add
        seen = []
        while len(seen) < 8 and not (seen and min(seen) < 1.02 * expected):
            seen.append(two.run(bytes_on_the_wire, workload, partial(way, stage=1))[0])
        return min(seen)

    for way, expected in ((ours, 4 * elements), (theirs, 1.5 * 4 * elements)):
        assert expected <= least(way, expected) < 1.02 * expected


# --- memory ---


def held(stage, dtype):
    module = wide(WIDTH, LAYERS).to(dtype)
    network, optimizer = prepared(module, adamw, stage)
    sharded = network if stage == 3 else optimizer
    a_step(network, optimizer, dtype=dtype)
    optimizer.step()
    optimizer.zero_grad()
    with MemoryLedger(module, optimizer) as ledger:
        if stage:
            watch(ledger, sharded)
        a_step(network, optimizer, dtype=dtype)
        kinds = ledger.now().by_kind()
        optimizer.step()
    if stage == 3:
        assert not any(unit.gathered_bytes for unit in network.sharded_units)
    return kinds


def scalars(stage):
    """Bytes of AdamW's counts of steps, one float32 for each tensor that it steps."""
    return 4 * (2 * LAYERS if stage in (0, 3) else 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_holds_in_float32_what_the_formula_says(ranks, stage):
    n = ranks.world_size
    elements = padded(LAYERS * LAYER, n) if stage < 3 else LAYERS * padded(LAYER, n)
    expected = state_per_rank(stage, elements, n, FLOAT32)
    expected["optimizer_state"] += scalars(stage)
    for rank, kinds in enumerate(ranks.run(held, stage, torch.float32)):
        if stage == 3 and rank == n - 1:  # padding, which is at the end, has no moments
            expected["optimizer_state"] -= 8 * (elements - LAYERS * LAYER)
        assert {kind: kinds[kind] for kind in expected} == expected


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_holds_in_mixed_precision_4p_and_12p_or_2p_and_14p(two, stage):
    """Parameters and gradients of 16 bits; master weights and moments in float32, sharded."""
    expected = state_per_rank(stage, LAYERS * LAYER, 2, MIXED)
    total = LAYERS * LAYER * (4 + 12 / 2 if stage == 1 else 2 + 14 / 2)
    assert sum(expected.values()) == total
    expected["optimizer_state"] += scalars(stage)
    for kinds in two.run(held, stage, torch.bfloat16):
        assert {kind: kinds[kind] for kind in expected} == expected


def test_one_rank_holds_16_bytes_a_parameter_in_every_stage():
    with Ranks(1) as one:
        for stage, dtype in ((1, torch.bfloat16), (2, torch.bfloat16), (3, torch.float32)):
            kinds = one.run(held, stage, dtype)[0]
            state = sum(kinds[kind] for kind in ("parameters", "gradients", "optimizer_state"))
            assert state - scalars(stage) == 16 * LAYERS * LAYER


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_peak_of_a_step_is_as_predicted(two, prefetch):
    """Gathered units and whole gradients included, within 5 percent; activations are a few rows."""
    width, layers, rows = 256, 4, 2

    def run():
        module = wide(width, layers)
        network, optimizer = prepared(module, adamw, 3, prefetch=prefetch)
        for _ in range(2):
            optimizer.zero_grad()
            network(torch.randn(rows, width)).sum().backward()
            optimizer.step()
        with MemoryLedger(module, optimizer) as ledger:
            watch(ledger, network)
            optimizer.zero_grad()
            network(torch.randn(rows, width)).sum().backward()
            optimizer.step()
        return ledger.peak.total

    predicted = peak_of_step([width * (width + 1)] * layers, 2, prefetch=prefetch)
    for peak in two.run(run):
        assert predicted <= peak <= 1.05 * predicted


def test_a_budget_refuses_stages_0_to_2_and_trains_at_stage_3(two):
    layers = 16
    elements = layers * LAYER
    budget = 9.7 * elements

    def run(stage):
        module = wide(WIDTH, layers)
        network, optimizer = prepared(module, adamw, stage, **({} if stage == 3 else {"bucket_cap_mb": 0.02}))
        with MemoryLedger(module, optimizer, budget_bytes=int(budget)) as ledger:
            if stage:
                watch(ledger, network if stage == 3 else optimizer)
            for _ in range(2):
                a_step(network, optimizer, rows=1)
                optimizer.step()

    assert sum(state_per_rank(2, elements, 2, FLOAT32).values()) > budget > peak_of_step([LAYER] * layers, 2)
    for stage in (0, 1, 2):
        with pytest.raises(RankError, match="don't fit") as caught:
            two.run(run, stage)
        assert isinstance(caught.value.exception, MemoryBudgetError)
    two.run(run, 3)


# --- the paper, and the layout ---


def test_the_papers_table_comes_out(root):
    rows = [(7.5, 4, 52.5, 41.3, 30.0), (7.5, 16, 35.6, 21.6, 7.5), (7.5, 64, 31.4, 16.6, 1.88),
            (7.5, 1024, 30.1, 15.1, 0.12), (128, 64, 536, 284, 32), (1000, 1024, 4012, 2014, 15.6)]  # fmt: skip
    for billions, ranks, *expected in rows:
        for stage, printed in zip((1, 2, 3), expected, strict=True):
            last_digit = 10 ** -len(f"{printed}".partition(".")[2].rstrip("0"))
            assert abs(sum(state_per_rank(stage, billions, ranks, MIXED).values()) - printed) <= last_digit
    assert sum(state_per_rank(0, 7.5, 64, MIXED).values()) == 120


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_parts_are_equal_to_the_element_and_hold_every_element_once(parts):
    layout = FlatLayout(((16, 4), (5,), (), (32,), (3, 3)), parts, align=16)
    seen = {index: [] for index in range(5)}
    for part in range(parts):
        for index in range(5):
            piece = layout.piece(index, part)
            seen[index] += range(piece.start, piece.stop)
            assert 0 <= piece.at <= piece.at + piece.numel <= layout.part_length
    assert [found == list(range(count)) for found, count in zip(seen.values(), layout.numels, strict=True)] == [
        True
    ] * 5
    assert all(start % 16 == 0 for start in layout.starts)
    flat = torch.full((layout.length,), torch.nan)
    layout.fill(flat, [torch.ones(shape) for shape in layout.shapes])
    assert flat.sum() == sum(layout.numels) == layout.length - layout.padding
