"""ZeRO changes where numbers are, not what they are: stages train as one process, as data parallel to the bit."""

from functools import partial

import pytest
import torch
from zero_ways import Zero, adamw, momentum, sgd, trained

from labkit.ranks import Ranks
from labkit.verify import CASES, assert_equivalent

STAGES = [1, 2, 3]
WORKLOADS = ("image", "text", "tokens")
#: by world size, what is trained for 50 steps; the rest for 8
LONG = {2: ("image", "text"), 3: ("text",), 4: ("image",)}


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{}ranks".format)
def ranks(request):
    with Ranks(request.param, timeout=60, check=False) as ranks:  # checks of messages are for the other files
        yield ranks


def equivalent(ranks, case, stage, optimizer=sgd, dtype=torch.float32, reference=None, micro_batches=1, **options):
    chosen = CASES[case]
    return assert_equivalent(
        chosen.build, chosen.batch(), chosen.loss, partial(Zero, stage=stage, unused=chosen.unused, **options),
        ranks.world_size, optimizer, dtype=dtype, ranks=ranks, reference=reference or chosen.reference, start="rank0",
        micro_batches=micro_batches,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gradients_weights_and_buffers_equal_one_process(ranks, case):
    """In float64 with AdamW on every model, and in float32 with SGD on the workloads."""
    if ranks.world_size in (1, 4) and case in ("uneven", "frozen", "dropout", "plain"):
        pytest.skip("two and three ranks show it")
    for stage in STAGES:
        assert equivalent(ranks, case, stage, adamw, torch.float64).identical
        if case in WORKLOADS:
            assert equivalent(ranks, case, stage).identical


@pytest.mark.parametrize("case", CASES)
def test_many_steps_are_those_of_data_parallel_to_the_bit(ranks, case):
    """50 on a workload; in rank order from three ranks on, since else the two sum in different orders."""
    algorithm = "ring" if ranks.world_size < 3 else "naive"
    optimizer = adamw if case in ("unused", "unused on one", "text") else momentum
    steps = 50 if case in LONG.get(ranks.world_size, ()) else 8
    runs = ranks.run(all_stages, CASES[case], optimizer, steps=steps, algorithm=algorithm)
    for expected, *others in runs:
        for mine in others:
            assert all(torch.equal(mine[name], value) for name, value in expected.items())


def all_stages(case, optimizer, **options):
    return [trained(case, optimizer, stage, **options) for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("case", "outside"), [("tokens", 1), ("tokens", 3), ("unused on one", 2)])
def test_accumulated_micro_batches_equal_one_backward(two, case, stage, outside):
    """Also where two or three of them reduce, so that shards of gradients are added to."""
    way = {"parts": 3, "outside": outside}
    equivalent(two, case, stage, adamw, torch.float64, "replay", micro_batches=3, **way)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"prefetch": False}, {"nested": False}], ids=str)
def test_however_units_are_gathered(two, options):
    equivalent(two, "tokens", 3, adamw, torch.float64, **options)
    equivalent(two, "image", 3, adamw, torch.float64, **options)
