"""Schedules are lists: they print as tables, illegal ones are refused with the reason, simulated times are exact."""

from fractions import Fraction

import pytest

from labkit.collectives import Network
from labkit.parallel.pipeline import (
    KNOWN,
    Action,
    Costs,
    IllegalScheduleError,
    Link,
    Schedule,
    best_cuts,
    check_schedule,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    schedule_faults,
    simulate,
    zb_h1,
)
from labkit.parallel.pipeline.partitioning import part_costs

ONE = Fraction(1)
EQUAL = Costs(ONE, 2 * ONE, ONE, ONE)


def test_a_schedule_prints_as_the_table_of_time_against_rank():
    assert str(gpipe(2, 2)) == "rank 0  F0 F1 .  .  B0 B1\nrank 1  .  F0 F1 B0 B1"
    assert str(one_f_one_b(2, 3)).splitlines() == [
        "rank 0  F0 F1 .  B0 F2 B1 .  B2",
        "rank 1  .  F0 B0 F1 B1 F2 B2",
    ]
    assert "2F0" in str(interleaved(2, 2)) and str(naive(1, 1)) == "rank 0  F0 B0"


def test_a_schedule_is_read_from_texts_and_from_actions():
    assert Schedule.of(["F0 F1 B0 B1", "F0 B0 F1 B1"]).rows[1][3] == Action("B", 1, 1)
    assert Schedule.of([["0F0", Action("F", 0, 1), "1B0", "0B0"]]).stages == 2
    assert Schedule.of(["F0 I0 W0"]).rows[0][1].words == "backward for inputs of micro-batch 0 on stage 0"
    with pytest.raises(ValueError, match="'X3' is no action"):
        Schedule.of(["F0 X3"])
    with pytest.raises(ValueError, match="no rank has an action"):
        Schedule.of([[], []])


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("name", KNOWN)
def test_known_schedules_are_legal_with_any_number_of_micro_batches(name, ranks):
    for micro_batches in range(1, 15):
        assert schedule_faults(KNOWN[name](ranks, micro_batches), ranks=ranks, micro_batches=micro_batches) == []


def test_interleaving_is_legal_with_any_number_of_chunks():
    for ranks in range(1, 6):
        for micro_batches in range(1, 14):
            for chunks in range(1, 5):
                made = interleaved(ranks, micro_batches, chunks)
                assert schedule_faults(made, stages=ranks * chunks) == []


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["F0 B0", "B0 F0"], "rank 1 runs backward of micro-batch 0 on stage 1 before its forward"),
        (["F0 I0 W0", "F0 W0 I0"], "before its backward for inputs"),
        (["B0", "F0 B0"], "missing send: rank 1 waits in forward of micro-batch 0 on stage 1 for rank 0"),
        (["F0 B0", "F0"], "missing send: rank 0 waits in backward of micro-batch 0 on stage 0 for rank 1"),
        (["F0 F1 B0 B1", "F0 B0"], "missing send: rank 0 waits in backward of micro-batch 1"),
        (["F0 F1 B1 B0", "F0 B0 F1 B1"], None),
        (["F0 B0 F1 B1", "F1 F0 B1 B0"], "deadlock: rank 0 waits in backward of micro-batch 0"),
        (["F0 F0 B0", "F0 B0"], "comes 2 times"),
        (["F0 B0 1F0", "F0 B0"], "stage 1 is on rank 0 and on rank 1"),
        (["F0 I0", "F0 B0"], "nobody runs backward for weights of micro-batch 0 on stage 0"),
        (["F0 B0 I0 W0", "F0 B0"], "whole and in parts"),
        (["F0 W0", "F0 B0"], "no backward for inputs of it"),
    ],
)
def test_what_can_not_run_is_refused_with_the_reason(rows, reason):
    schedule = Schedule.of(rows)
    if reason is None:
        assert schedule_faults(schedule) == []
        return
    with pytest.raises(IllegalScheduleError) as caught:
        check_schedule(schedule)
    assert any(reason in one for one in caught.value.reasons) and caught.value.reasons[0] in str(caught.value)
    with pytest.raises(IllegalScheduleError):
        simulate(schedule)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("F0 B0", r"'F0 B0' is no list with the actions of each rank: give \['F0 B0', 'F0 B0'\]"),
        ([None, None], "no list with the actions of each rank"),
        ([[("F", "0", 0)]], r"\('F', '0', 0\) is no action: write F, B, I or W"),
        ([[("F", 0.5, 0)]], "is no action"),
        (["F0 f0"], "'f0' is no action"),
    ],
)
def test_what_is_no_list_of_actions_is_refused(rows, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        Schedule.of(rows)


def test_a_number_far_beyond_the_lists_is_told_of_at_once():
    """Not as so many actions that nobody runs."""
    for text, what in (("F999999999 B0", "micro-batch"), ("999999999F0", "stage")):
        (reason,) = schedule_faults(Schedule.of([text]))
        assert reason.startswith(f"it names {what} 999999999, but has ")


def test_a_stage_that_nobody_has_is_a_missing_send():
    with pytest.raises(IllegalScheduleError, match=r"missing send: rank 0 waits .* for the rank of stage 0"):
        check_schedule(Schedule.of(["1F0 1B0"]))


def test_too_many_activations_alive_are_refused():
    check_schedule(one_f_one_b(4, 8), max_alive=4)
    with pytest.raises(IllegalScheduleError, match="rank 0 keeps those of 8 micro-batches, 4 are allowed"):
        check_schedule(gpipe(4, 8), max_alive=4)


def test_a_schedule_for_other_numbers_is_refused():
    with pytest.raises(IllegalScheduleError, match="it is for 2 ranks, not for 3"):
        check_schedule(gpipe(2, 4), ranks=3)
    with pytest.raises(IllegalScheduleError, match="for 4 micro-batches, not for 5"):
        check_schedule(gpipe(2, 4), micro_batches=5)


@pytest.mark.parametrize(("k", "m"), [(1, 3), (2, 1), (2, 8), (4, 8), (4, 3), (8, 32)])
@pytest.mark.parametrize("made", [gpipe, one_f_one_b])
def test_with_equal_costs_and_free_links_the_idle_share_is_exactly_the_formulas(made, k, m):
    for costs in (Costs(ONE, ONE), Costs(ONE, 2 * ONE), Costs(3 * ONE, 5 * ONE)):
        assert simulate(made(k, m), costs).idle_share == Fraction(k - 1, m + k - 1)


@pytest.mark.parametrize(("k", "m"), [(2, 8), (4, 3)])
def test_the_naive_split_keeps_one_rank_busy_at_a_time(k, m):
    assert simulate(naive(k, m), EQUAL).idle_share == Fraction(k - 1, k)


@pytest.mark.parametrize(("k", "m"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_1f1b_keeps_at_most_k_micro_batches_alive_and_gpipe_all(k, m):
    assert one_f_one_b(k, m).peak_alive == list(range(k, 0, -1))
    assert gpipe(k, m).peak_alive == [m] * k
    assert max(zb_h1(k, m).peak_alive) == k


@pytest.mark.parametrize(("k", "m"), [(2, 8), (4, 8), (8, 32)])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(k, m, chunks):
    whole = simulate(one_f_one_b(k, m), EQUAL)
    found = simulate(interleaved(k, m, chunks), Costs(ONE / chunks, 2 * ONE / chunks))
    assert found.bubble == whole.bubble / chunks and whole.bubble == 3 * (k - 1)


@pytest.mark.parametrize(("k", "m"), [(2, 4), (4, 8), (8, 32)])
def test_zero_bubble_h1_has_a_third_of_1f1bs_bubble_at_its_memory(k, m):
    """The ratio that the paper's authors publish for the schedule of equal memory, where F, I and W cost the same."""
    assert simulate(zb_h1(k, m), EQUAL).bubble == simulate(one_f_one_b(k, m), EQUAL).bubble / 3


#: speed-up over 2 partitions and 1 micro-batch, Huang and others 2019 (arXiv:1811.06965), table 2, M = 32
GPIPE_TABLE_2 = {"transformer": {2: 1.8, 4: 3.4, 8: 6.3}, "amoebanet": {2: 1.21, 4: 1.84, 8: 3.48}}


@pytest.mark.parametrize("model", GPIPE_TABLE_2)
def test_gpipes_published_speedups_lie_under_what_the_simulator_allows(model):
    base = simulate(gpipe(2, 1), Costs(ONE / 2, ONE)).total
    for k, published in GPIPE_TABLE_2[model].items():
        total = simulate(gpipe(k, 32), Costs(ONE / (32 * k), 2 * ONE / (32 * k))).total
        bound = Fraction(32 * k, 32 + k - 1)
        assert base / total == bound and published < bound


def test_a_message_occupies_its_senders_outlet_and_then_takes_its_latency():
    one = simulate(gpipe(2, 2), Costs(ONE, ONE), Link(latency=2, sending=3))
    # rank 0 is through with F1 at 2, but its outlet sends F0 until 4, and F1 until 7
    assert [timed.start for timed in one.rows[1][:2]] == [6, 9]
    # rank 1 is through with B0 at 11 and B1 at 12, but its outlet sends B0's gradient until 14, and B1's until 17
    assert [timed.start for timed in one.rows[0][2:]] == [16, 19] and one.total == 20
    network = Network(latency_us=50, bandwidth_gbit_s=1)
    assert vars(Link.of(network, 1000)) == pytest.approx({"latency": 50e-6, "sending": 8e-6})


def test_a_slow_stage_sets_the_pace():
    total = simulate(gpipe(3, 8), Costs([ONE, 3 * ONE, ONE], [ONE, 3 * ONE, ONE])).total
    assert total == 2 * (1 + 3 * 8 + 1)
    with pytest.raises(ValueError, match="forward has 2 costs for 3 stages"):
        simulate(gpipe(3, 8), Costs([1, 2]))


def test_costs_of_the_parts_of_a_backward_follow_from_each_other():
    assert Costs(1, 6).of(Action("I", 0, 0)) == Costs(1, 6).of(Action("W", 0, 0)) == 3
    assert Costs(1, 6, 4).of(Action("W", 0, 0)) == 2 and Costs(1, 6, None, 1).of(Action("I", 0, 0)) == 5


def test_the_best_cuts_are_those_of_trying_all():
    from itertools import combinations

    for costs in ([5, 1, 1, 1, 5], [1, 2, 3, 4, 5, 6, 7], [9, 1, 1], [0, 0, 0, 4], [2, 2, 2, 2]):
        for parts in range(1, len(costs) + 1):
            least = min(max(part_costs(costs, cuts)) for cuts in combinations(range(1, len(costs)), parts - 1))
            assert max(part_costs(costs, best_cuts(costs, parts))) == least
    assert best_cuts([1, 1, 1, 1, 1, 1, 6], 3) == [3, 6]  # the rest as evenly as can be
    with pytest.raises(ValueError, match="3 costs can't be cut into 4"):
        best_cuts([1, 2, 3], 4)
