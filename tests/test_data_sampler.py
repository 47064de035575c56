"""Who takes which sample: every sample once, whatever the number of ranks, and again the same after a resume."""

import itertools
import json
from collections.abc import Iterable

import numpy as np
import pytest
from torch.utils.data import DataLoader

from labkit.data.errors import DataError
from labkit.data.sampler import DistributedSampler, GlobalBatches

LENGTHS, RANKS = (0, 1, 2, 7, 12, 101), (1, 2, 3, 4, 7)


def samplers(length: int, ranks: int, **options) -> "list[DistributedSampler]":
    return [DistributedSampler(length, ranks, rank, **options) for rank in range(ranks)]


def batches(length: int, ranks: int, **options) -> "list[GlobalBatches]":
    return [GlobalBatches(length, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def flat(lists: "Iterable[list[int]]") -> "list[int]":
    return list(itertools.chain.from_iterable(lists))


def dealt_back(shares: "list[list[int]]") -> "list[int]":
    """The global order, from what each rank took of it in turn."""
    rounds = itertools.zip_longest(*shares)
    return [index for turn in rounds for index in turn if index is not None]


def joined(shares: "list[GlobalBatches]") -> "list[list[int]]":
    """The global batches, from the shares of all ranks."""
    return [flat(step) for step in zip(*shares, strict=True)]


# --- DistributedSampler


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_is_taken_exactly_once(length, ranks, shuffle):
    shares = [list(sampler) for sampler in samplers(length, ranks, shuffle=shuffle)]
    assert sorted(flat(shares)) == list(range(length))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("length", LENGTHS)
def test_the_order_of_all_ranks_together_does_not_depend_on_their_number(length):
    alone = list(DistributedSampler(length, seed=3))
    for ranks in RANKS:
        assert dealt_back([list(sampler) for sampler in samplers(length, ranks, seed=3)]) == alone


def test_without_shuffling_the_order_is_that_of_the_set():
    assert list(DistributedSampler(range(10), 3, 1, shuffle=False)) == [1, 4, 7]


def test_the_length_is_the_number_of_samples():
    for length, ranks, drop in itertools.product(LENGTHS, RANKS, (True, False)):
        for sampler in samplers(length, ranks, drop_last=drop):
            assert len(sampler) == len(list(sampler))


def test_drop_last_gives_every_rank_the_same_number():
    for length, ranks in itertools.product(LENGTHS, RANKS):
        shares = [list(sampler) for sampler in samplers(length, ranks, drop_last=True)]
        assert {len(share) for share in shares} == {length // ranks}
        whole = list(DistributedSampler(length))
        assert dealt_back(shares) == whole[: length // ranks * ranks]


def test_each_pair_of_seed_and_epoch_has_an_order_of_its_own():
    orders = set()
    for seed, epoch in itertools.product(range(4), range(4)):
        sampler = DistributedSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
        assert tuple(sampler) in orders, "the same again"
    assert len(orders) == 16


def test_the_shuffle_favours_no_position():
    mean = np.zeros(5)
    for epoch in range(2000):
        sampler = DistributedSampler(5)
        sampler.set_epoch(epoch)
        mean += np.array(list(sampler)) / 2000
    assert np.abs(mean - 2).max() < 0.2  # standard error: sqrt(2 / 2000) = 0.03


# --- GlobalBatches


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_global_batches_do_not_depend_on_the_number_of_ranks(length, ranks, batch_size):
    order = list(DistributedSampler(length, seed=5))
    expected = [order[first : first + batch_size] for first in range(0, length, batch_size)]
    assert joined(batches(length, ranks, batch_size=batch_size, seed=5)) == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_a_batch_is_shared_evenly_and_contiguously(ranks):
    for step in zip(*batches(101, ranks, batch_size=8, shuffle=False), strict=True):
        sizes = [len(share) for share in step]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        whole = flat(step)
        assert whole == list(range(whole[0], whole[0] + len(whole)))


def test_a_rank_whose_share_is_empty_still_takes_the_step():
    assert [list(rank) for rank in batches(5, 3, batch_size=4, shuffle=False)] == [[[0, 1], [4]], [[2], []], [[3], []]]


def test_the_length_is_the_number_of_steps():
    for length, ranks, drop in itertools.product(LENGTHS, RANKS, (True, False)):
        for share in batches(length, ranks, batch_size=4, drop_last=drop):
            assert len(share) == len(list(share)) == (length // 4 if drop else -(-length // 4))


def test_drop_last_leaves_out_only_the_shorter_batch():
    kept = joined(batches(101, 3, batch_size=8, drop_last=True))
    assert kept == joined(batches(101, 3, batch_size=8))[:-1]


def test_a_data_loader_takes_them_as_its_batch_sampler():
    loader = DataLoader(range(10), batch_sampler=GlobalBatches(10, batch_size=4, shuffle=False), collate_fn=list)
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# --- resuming


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("later", [1, 2, 4])
def test_a_sampler_resumes_at_any_round_with_any_number_of_ranks(ranks, later):
    whole = epoch_order(25, epoch=2)
    for rounds in range(25 // ranks + 1):
        before = samplers(25, ranks)
        states = []
        for sampler in before:
            sampler.set_epoch(2)
            taken = list(itertools.islice(sampler, rounds))
            assert len(taken) == rounds
            states.append(json.loads(json.dumps(sampler.state_dict())))
        assert all(state == states[0] for state in states), "every rank saves the same"
        after = samplers(25, later)
        for sampler in after:
            sampler.load_state_dict(states[0])
            sampler.set_epoch(2)  # as the loop over epochs does
        lengths = [len(sampler) for sampler in after]
        shares = [list(sampler) for sampler in after]
        assert dealt_back(shares) == whole[rounds * ranks :]
        assert lengths == [len(share) for share in shares]


def test_after_the_last_sample_the_state_says_that_the_epoch_is_over():
    for ranks, drop in itertools.product((1, 2, 3), (True, False)):
        sampler, steps = (
            DistributedSampler(25, ranks, 0, drop_last=drop),
            GlobalBatches(25, batch_size=4, drop_last=drop),
        )
        assert len(list(sampler)) and len(list(steps))
        assert sampler.state_dict()["position"] == steps.state_dict()["position"] == 25
    last = DistributedSampler(25, 2, 0)
    for _ in zip(range(13), last, strict=False):  # not exhausted, but nothing is left
        position = last.state_dict()["position"]
    assert position == 25


def epoch_order(length: int, epoch: int) -> "list[int]":
    sampler = DistributedSampler(length)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("later", [1, 2, 4])
def test_batches_resume_at_any_step_with_any_number_of_ranks(ranks, later):
    whole = joined(batches(30, ranks, batch_size=4))
    assert len(whole) == 8
    for steps in range(len(whole) + 1):
        sampler = batches(30, ranks, batch_size=4)[0]
        iterator = iter(sampler)
        for _ in range(steps):
            next(iterator)
        after = batches(30, later, batch_size=4)
        for share in after:
            share.load_state_dict(sampler.state_dict())
            assert len(share) == len(whole) - steps
        assert joined(after) == whole[steps:]
        assert joined(after) == whole, "the pass after that is a whole one"


def test_batches_resume_at_any_sample_with_another_batch_size():
    order = flat(joined(batches(30, 2, batch_size=4)))
    for position in range(31):
        saved = GlobalBatches(30, batch_size=4).state_dict(position=position)
        after = batches(30, 2, batch_size=7)
        for share in after:
            share.load_state_dict(saved)
        assert flat(joined(after)) == order[position:]


def test_the_position_can_be_given_where_workers_fetch_ahead():
    sampler = GlobalBatches(40, batch_size=4)
    loader = DataLoader(range(40), batch_sampler=sampler, num_workers=1, collate_fn=list)
    used = [next(iterator) for iterator in [iter(loader)] for _ in range(3)]
    assert sampler.state_dict()["position"] > 12, "the worker was sent more than was used"
    resumed = GlobalBatches(40, batch_size=4)
    resumed.load_state_dict(sampler.state_dict(position=12))
    assert used + list(resumed) == list(GlobalBatches(40, batch_size=4))


def test_a_new_epoch_starts_at_its_beginning():
    sampler = DistributedSampler(10)
    list(itertools.islice(sampler, 4))
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(10)) and sampler.state_dict()["epoch"] == 1


def test_an_evaluation_sampler_gives_the_same_again_after_every_pass():
    sampler = DistributedSampler(10, 3, 1, shuffle=False)
    assert list(sampler) == list(sampler) == [1, 4, 7]


def test_a_state_of_another_set_or_order_is_refused():
    saved = DistributedSampler(10, seed=1).state_dict()
    for other, name in [
        (DistributedSampler(11, seed=1), "length"),
        (DistributedSampler(10, seed=2), "seed"),
        (DistributedSampler(10, seed=1, shuffle=False), "shuffle"),
    ]:
        with pytest.raises(DataError, match=f"can't resume: {name} is"):
            other.load_state_dict(saved)
    with pytest.raises(DataError, match="at sample 11 of 10"):
        DistributedSampler(10, seed=1).load_state_dict(saved | {"position": 11})


@pytest.mark.parametrize("ranks, rank", [(0, 0), (2, 2), (2, -1)])
def test_a_rank_that_does_not_exist_is_refused(ranks, rank):
    with pytest.raises(DataError, match=f"no rank {rank} among {ranks}"):
        DistributedSampler(10, ranks, rank)


def test_impossible_values_are_refused():
    with pytest.raises(DataError, match="batch size must be at least 1"):
        GlobalBatches(10, batch_size=0)
    with pytest.raises(DataError, match="at least 0, not -1"):
        DistributedSampler(-1)
    with pytest.raises(DataError, match="seed"):
        DistributedSampler(1, seed=-1)
    with pytest.raises(DataError, match="epoch"):
        DistributedSampler(1).set_epoch(-1)
