"""The order and the arithmetic of benchmarks; nothing is timed."""

from collections import Counter
from itertools import pairwise

import pytest

from labkit.bench.side_by_side import Comparison, Ratio, slowest, take_turns
from labkit.ranks import Ranks


def order_of(steps, warm_ups):
    done = []
    seconds = take_turns([lambda n=n: done.append(n) for n in "ABC"], steps=steps, warm_ups=warm_ups)
    return done, seconds


def test_actions_take_turns_and_each_is_as_often_its_own_predecessor():
    done, seconds = order_of(6, 0)
    assert "".join(done) == "BCAACB" + "CABBAC" + "ABCCBA"
    assert [len(one) for one in seconds] == [6, 6, 6]
    assert Counter(one for one, other in pairwise(done) if one == other) == {"A": 1, "B": 1, "C": 1}


def test_warm_ups_are_done_and_not_counted():
    done, seconds = order_of(2, 5)
    assert len(done) == 3 * (6 + 2) and [len(one) for one in seconds] == [2, 2, 2]


def test_a_step_lasts_as_long_as_on_the_slowest_rank():
    assert slowest([[[1, 5], [2, 2]], [[3, 4], [1, 9]]]) == [[3, 5], [2, 9]]


def test_the_ratio_is_the_median_over_rounds_with_its_quartiles():
    ratio = Ratio.of([1, 1, 2, 2, 3, 3], [1, 1, 1, 1, 1, 1])
    assert (ratio.low, ratio.median, ratio.high) == (1, 2, 3)
    assert Ratio.of([1, 3], [1, 1]) == Ratio(2, 2, 2)


def test_a_line_says_both_medians_the_ratio_its_spread_the_control_and_the_target():
    found = Comparison(ours=[0.002] * 4, theirs=[0.004] * 4, control=[0.005] * 4)
    assert found.line("name", target=0.4) == (
        "name: 2.00 ms, PyTorch's 4.00 ms; ratio 0.500 (quartiles 0.500 to 0.500), over the target of 0.4; "
        "two of PyTorch's 1.250 (quartiles 1.250 to 1.250)"
    )
    assert "within the target of 1;" in found.line("name", target=1.0) and "target" not in found.line("name")


@pytest.mark.parametrize("workload", ["image", "text", "small"])
def test_the_benchmark_of_data_parallel_trains_alike_under_every_wrapper(workload):
    """What is timed is the same work: after three steps all have the same weights."""
    with Ranks(2, check=False) as ranks:
        for differences in ranks.run(weights_apart, workload):
            assert max(differences) < 1e-4


def weights_apart(name):
    from torch import nn

    from labkit.bench import ddp_bench
    from labkit.parallel import DistributedDataParallel

    workload = {"image": ddp_bench.image_workload, "text": ddp_bench.text_workload}.get(name) or ddp_bench.many_small(
        20
    )
    modules = []

    def wrapped_by(wrap):
        def keep(module):
            modules.append(module)
            return wrap(module)

        return keep

    for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        step = ddp_bench.step_of(workload, wrapped_by(wrap))
        for _ in range(3):
            step()
    pairs = zip(*(module.parameters() for module in modules), strict=True)
    return [(one - other).abs().max().item() for one, other in pairs]
