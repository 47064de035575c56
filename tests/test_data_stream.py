"""Streaming from shards: nothing twice, nothing left out, the same again after a resume, and little memory."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from labkit.data.errors import DataError
from labkit.data.shard_loader import ShardLoader
from labkit.data.shards import write_shards
from labkit.data.shuffle_buffer import ShuffleBuffer
from labkit.data.stream import ShardStream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on purpose
LENGTH = 53  # over shards of 10: the last one has 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Samples with a number, and values whose count varies with it."""
    place = tmp_path_factory.mktemp("set") / "shards"
    samples = ({"number": n, "values": torch.arange(n % 4) + n} for n in range(LENGTH))
    write_shards(samples, place, samples_per_shard=10)
    return place


def numbers(samples) -> "list[int]":
    found = []
    for sample in samples:
        number = int(sample["number"])
        assert torch.equal(sample["values"], torch.arange(number % 4) + number), "the sample's own values"
        found.append(number)
    return found


def streams(folder, ranks: int, **options) -> "list[ShardStream]":
    return [ShardStream(folder, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def as_list(samples):
    return samples


def loader(folder, workers: int, *, batch_size: int = 4, epoch: int = 0, **options) -> ShardLoader:
    stream = ShardStream(folder, buffer_size=8, **options)
    stream.set_epoch(epoch)
    return ShardLoader(stream, batch_size=batch_size, num_workers=workers, collate_fn=as_list)


# --- the buffer


@pytest.mark.parametrize("count, size", [(0, 3), (1, 3), (10, 1), (10, 3), (10, 10), (10, 99), (9000, 50)])
def test_the_buffer_gives_every_position_once_and_none_too_early(count, size):
    order = list(ShuffleBuffer(count, size, np.random.default_rng(0)))
    assert sorted(order) == list(range(count))
    assert all(position < turn + size for turn, position in enumerate(order))


def test_a_buffer_of_one_does_not_shuffle():
    assert list(ShuffleBuffer(10, 1, np.random.default_rng(0))) == list(range(10))


def test_a_buffer_as_large_as_the_set_shuffles_evenly():
    mean = sum(np.array(list(ShuffleBuffer(6, 6, np.random.default_rng(seed)))) for seed in range(2000)) / 2000
    assert np.abs(mean - 2.5).max() < 0.25  # standard error: sqrt(35 / 12 / 2000) = 0.04


# --- coverage and order


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 60])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_the_set_without_overlap_and_differ_by_one_sample_at_most(folder, ranks, shuffle):
    shares = [numbers(stream) for stream in streams(folder, ranks, shuffle=shuffle, buffer_size=8)]
    assert sorted(itertools.chain.from_iterable(shares)) == list(range(LENGTH))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [len(stream) for stream in streams(folder, ranks)]


@pytest.mark.parametrize("ranks, workers", [(1, 2), (1, 3), (2, 2)])
def test_workers_share_a_ranks_part_without_overlap(folder, ranks, workers):
    found = []
    for rank in range(ranks):
        batches = loader(folder, workers, num_replicas=ranks, rank=rank)
        expected = len(batches)
        read = list(batches)
        assert len(read) == expected
        found += [number for batch in read for number in numbers(batch)]
    assert sorted(found) == list(range(LENGTH))


def test_without_shuffling_the_order_is_that_of_writing(folder):
    assert numbers(ShardStream(folder, shuffle=False)) == list(range(LENGTH))


def test_the_order_follows_from_seed_epoch_and_rank(folder):
    orders = set()
    for seed, epoch in itertools.product(range(3), range(3)):
        stream, twin = (ShardStream(folder, seed=seed, buffer_size=8) for _ in range(2))
        stream.set_epoch(epoch)
        twin.set_epoch(epoch)
        order = numbers(stream)
        assert order == numbers(twin) == numbers(stream)
        orders.add(tuple(order))
    assert len(orders) == 9


def test_a_shuffled_stream_mixes_within_and_across_shards(folder):
    order = numbers(ShardStream(folder, buffer_size=20))
    shards = [number // 10 for number in order]
    assert sum(a != b for a, b in itertools.pairwise(shards)) > 15
    assert [n for n in order if n < 10] != list(range(10))


def test_a_shuffled_stream_takes_the_shards_in_another_order(folder):
    order = numbers(ShardStream(folder, buffer_size=1))
    shards = [shard for shard, _ in itertools.groupby(number // 10 for number in order)]
    assert sorted(shards) == [0, 1, 2, 3, 4, 5] != shards


def test_ranks_and_workers_do_not_shuffle_alike(tmp_path):
    write_shards(({"number": n, "values": torch.arange(n % 4) + n} for n in range(40)), tmp_path, samples_per_shard=40)
    first, second = (numbers(stream) for stream in streams(tmp_path, 2))
    assert first != [number - 20 for number in second]
    both = numbers(ShardLoader(ShardStream(tmp_path), batch_size=None, num_workers=2))
    assert both[::2] != [number - 20 for number in both[1::2]]


# --- resuming


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_resumes_exactly_at_any_sample(folder, ranks, shuffle):
    for rank in range(ranks):
        options = {"num_replicas": ranks, "rank": rank, "shuffle": shuffle, "buffer_size": 8}
        stream = ShardStream(folder, **options)
        stream.set_epoch(2)
        order, states = [], [stream.state_dict()]
        for sample in stream:
            order += numbers([sample])
            states.append(json.loads(json.dumps(stream.state_dict())))
        assert len(states) == len(stream) + 1
        for taken, state in enumerate(states):
            resumed = ShardStream(folder, **options)
            resumed.load_state_dict(state)
            resumed.set_epoch(2)  # as the loop over epochs does
            assert numbers(resumed) == order[taken:]
            assert numbers(resumed) == order, "the pass after that is a whole one"


# batches of 17: the parts of three workers are 17, 18 and 18 samples, so the first is through before the others
@pytest.mark.parametrize("workers, batch_size", [(0, 4), (1, 4), (3, 4), (3, 17)])
def test_a_loader_resumes_exactly_at_any_batch_whatever_the_workers_fetched_ahead(folder, workers, batch_size):
    batches = loader(folder, workers, batch_size=batch_size, epoch=1)
    whole, states = [], [batches.state_dict()]
    for batch in batches:
        whole.append(numbers(batch))
        states.append(json.loads(json.dumps(batches.state_dict())))
        assert sum(states[-1]["taken"]) == sum(map(len, whole))
    assert sorted(itertools.chain.from_iterable(whole)) == list(range(LENGTH))
    # every turn of the workers, and the end, where some of them have nothing left
    for taken in {0, 1, 2, 4, len(whole) - 2, len(whole) - 1, len(whole)}:
        resumed = loader(folder, workers, batch_size=batch_size)
        resumed.load_state_dict(states[taken])
        assert len(resumed) == len(whole) - taken
        assert [numbers(batch) for batch in resumed] == whole[taken:]


def test_a_resumed_loader_can_be_resumed_again(folder):
    whole = [numbers(batch) for batch in loader(folder, 2)]
    state, found = loader(folder, 2).state_dict(), []
    for _ in range(4):
        resumed = loader(folder, 2)
        resumed.load_state_dict(state)
        found += [numbers(batch) for batch in itertools.islice(resumed, 3)]
        state = resumed.state_dict()
    assert found == whole[:12]


def test_single_samples_resume_at_any_sample_with_workers(folder):
    stream = ShardStream(folder, buffer_size=8)
    whole = numbers(ShardLoader(stream, batch_size=None, num_workers=2))
    assert sorted(whole) == list(range(LENGTH))
    first = ShardLoader(stream, batch_size=None, num_workers=2)
    assert numbers(itertools.islice(first, 7)) == whole[:7]
    resumed = ShardLoader(ShardStream(folder, buffer_size=8), batch_size=None, num_workers=2)
    resumed.load_state_dict(first.state_dict())
    assert numbers(resumed) == whole[7:]


def test_a_new_epoch_starts_at_its_beginning(folder):
    stream = ShardStream(folder)
    numbers(itertools.islice(stream, 20))
    stream.set_epoch(1)
    assert len(numbers(stream)) == LENGTH


def test_a_state_of_another_order_is_refused(folder, tmp_path):
    stream = ShardStream(folder, num_replicas=2, rank=0)
    numbers(itertools.islice(stream, 3))
    saved = stream.state_dict()
    write_shards([{"a": 1}], tmp_path, samples_per_shard=1)
    for other, name in [
        (ShardStream(tmp_path, num_replicas=2, rank=0), "index"),
        (ShardStream(folder, num_replicas=3, rank=0), "num_replicas"),
        (ShardStream(folder, num_replicas=2, rank=1), "rank"),
        (ShardStream(folder, num_replicas=2, rank=0, seed=1), "seed"),
        (ShardStream(folder, num_replicas=2, rank=0, shuffle=False), "shuffle"),
        (ShardStream(folder, num_replicas=2, rank=0, buffer_size=3), "buffer_size"),
    ]:
        with pytest.raises(DataError, match=f"can't resume: {name} is"):
            other.load_state_dict(saved)
    workers = ShardLoader(ShardStream(folder, num_replicas=2, rank=0), num_workers=2)
    workers.load_state_dict(saved)
    with pytest.raises(DataError, match="can't resume with 2 workers: its state was saved with 1"):
        iter(workers)


def test_impossible_values_are_refused(folder):
    with pytest.raises(DataError, match="buffer_size must be at least 1"):
        ShardStream(folder, buffer_size=0)
    with pytest.raises(DataError, match="no rank 2 among 2"):
        ShardStream(folder, num_replicas=2, rank=2)
    with pytest.raises(DataError, match="batch size must be at least 1"):
        ShardLoader(ShardStream(folder), batch_size=0)
    with pytest.raises(DataError, match="samples_per_shard must be at least 1"):
        write_shards([], folder, samples_per_shard=0)


# --- memory

SAMPLES, PER_SHARD, CEILING = 240, 4, 48  # samples of 1 MiB; MiB that reading may add to the address space

UNDER_A_CEILING = f"""
import resource, sys
import psutil, torch
from labkit.data import ShardStream
torch.set_num_threads(1)
stream = ShardStream(sys.argv[1], buffer_size=8)
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + {CEILING} * 2**20,) * 2)
print(sum(int(sample["block"][0]) for sample in stream))
try:
    print(len([sample["block"] for sample in stream]))
except (MemoryError, RuntimeError) as error:
    print("not whole:", "memory" in str(error) or type(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit on the address space")
def test_a_set_five_times_the_memory_streams_and_would_not_fit_whole(tmp_path):
    assert SAMPLES >= 5 * CEILING
    blocks = (torch.full((2**20,), n, dtype=torch.uint8) for n in range(SAMPLES))
    write_shards(({"block": block} for block in blocks), tmp_path / "set", samples_per_shard=PER_SHARD)
    command = [sys.executable, "-c", UNDER_A_CEILING, str(tmp_path / "set")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [str(sum(range(SAMPLES))), "not whole: True"], done.stderr
