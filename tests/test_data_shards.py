"""Shards on disk: what was written is what is read, or there is a sentence."""

import numpy as np
import pytest
import torch

from labkit.data.errors import DataError
from labkit.data.shards import read_index, write_shards
from labkit.data.stream import ShardStream


def small_set(tmp_path):
    write_shards(({"a": n} for n in range(6)), tmp_path, samples_per_shard=3)
    return tmp_path / "shard-00001.safetensors"


def test_samples_come_back_as_they_were_written(tmp_path):
    written = [
        {"image": torch.rand(3, 4, 5), "label": 1, "mask": np.array([True]), "empty": torch.zeros(0, 2)},
        {"image": torch.rand(3, 2, 7), "label": 2, "mask": np.array([]).astype(bool), "empty": torch.zeros(3, 0)},
        {"image": torch.rand(1, 1, 1), "label": 3, "mask": np.array([False, True]), "empty": torch.zeros(1, 1)},
    ]
    write_shards(written, tmp_path / "set", samples_per_shard=2)
    read = list(ShardStream(tmp_path / "set", shuffle=False))
    assert [path.name for path in sorted((tmp_path / "set").iterdir())] == [
        "index.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    for before, after in zip(written, read, strict=True):
        assert before.keys() == after.keys()
        for name, value in after.items():
            expected = torch.as_tensor(before[name])
            assert torch.equal(value, expected) and value.dtype == expected.dtype and value.shape == expected.shape


def test_a_sample_owns_its_memory(tmp_path):
    small_set(tmp_path)
    first = next(iter(ShardStream(tmp_path, shuffle=False)))
    assert first["a"].untyped_storage().nbytes() == 8


def test_the_index_counts_what_was_written(tmp_path):
    write_shards(({"number": n, "values": [n] * 3} for n in range(53)), tmp_path, samples_per_shard=10)
    index = read_index(tmp_path)
    assert index.samples == 53 and [shard.samples for shard in index.shards] == [10, 10, 10, 10, 10, 3]
    assert index.fields == {"number": "torch.int64", "values": "torch.int64"}


@pytest.mark.parametrize(
    "samples, complaint",
    [
        ([], "no samples to write"),
        ([{}], "has no fields"),
        ([{"text": "words"}], "Field 'text' holds a str"),
        ([{"a.shape": 1}], "names that end in '.shape'"),
        ([{"a": 1}, {"b": 1}], "Sample 1 differs from the first"),
        ([{"a": 1}, {"a": 1.0}], "Sample 1 differs from the first"),
        ([{"a": [1]}, {"a": [[1]]}], r"a int64 \[2 dims\], the first has a int64 \[1 dims\]"),
    ],
)
def test_samples_that_do_not_fit_are_refused_and_there_is_no_set(samples, complaint, tmp_path):
    with pytest.raises(DataError, match=complaint):
        write_shards(samples, tmp_path, samples_per_shard=1)
    with pytest.raises(DataError, match="holds no set of shards"):
        ShardStream(tmp_path)


def test_a_set_is_not_overwritten(tmp_path):
    small_set(tmp_path)
    with pytest.raises(DataError, match="holds a set of shards already"):
        write_shards([{"a": 1}], tmp_path, samples_per_shard=1)


def test_a_truncated_shard_is_noticed_when_the_stream_is_made(tmp_path):
    shard = small_set(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"shard-00001\.safetensors has .* bytes instead of"):
        ShardStream(tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00001\.safetensors has 0 bytes instead of"):
        ShardStream(tmp_path)


def test_a_damaged_shard_is_noticed_when_it_is_opened(tmp_path):
    shard = small_set(tmp_path)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    read = iter(ShardStream(tmp_path, shuffle=False))
    assert [int(next(read)["a"]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match=r"shard-00001\.safetensors is damaged"):
        next(read)
    assert len(list(ShardStream(tmp_path, shuffle=False, check=False))) == 6


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "version": 1}'])
def test_an_index_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"can't be read|is of the format other 1"):
        ShardStream(tmp_path)
