"""A set cut into shards, files that are each small enough for memory, and an index that says what is in them.

    shard-00000.safetensors   for each field `f` of a sample two tensors: `f`, the values of all samples of the shard
                              flattened and concatenated, and `f.shape`, int64 [samples, dims], one shape a sample
    index.json                {"format": "labkit-shards", "version": 1, "samples": n, "fields": {"f": "torch.uint8"},
                               "shards": [{"file": ..., "samples": n, "bytes": n, "sha256": ...}]}

So a field may have another size in each sample (texts, photographs). The index is written last: without it there is no
set. Nothing is unpickled (safetensors: github.com/huggingface/safetensors).
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from labkit.data.errors import DataError

Sample = dict[str, Tensor]
_INDEX, _FORMAT, _VERSION, _SHAPE = "index.json", "labkit-shards", 1, ".shape"


@dataclass(frozen=True)
class Shard:
    """One file of the set: its name, how many samples and bytes it has, and its SHA-256."""

    file: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """What `index.json` says: the folder, the fields with their dtypes, the shards; `digest` is the file's SHA-256."""

    folder: Path
    fields: dict[str, str]
    shards: tuple[Shard, ...]
    digest: str

    @property
    def samples(self) -> int:
        """How many samples the set has."""
        return sum(shard.samples for shard in self.shards)


def write_shards(
    samples: Iterable[Mapping[str, Any]], folder: str | os.PathLike[str], *, samples_per_shard: int
) -> ShardIndex:
    """Write `samples` as a set of shards into `folder`, keeping no more than one shard in memory.

    A sample maps the names of its fields to tensors, arrays or numbers. All samples have the same fields; a field keeps
    its dtype and its number of dims, its sizes may vary. Raises `DataError` for anything else, and where `folder` holds
    a set already.
    """
    place = Path(folder)
    if samples_per_shard < 1:
        raise DataError(f"samples_per_shard must be at least 1, not {samples_per_shard}.")
    if (place / _INDEX).exists():
        raise DataError(f"{place} holds a set of shards already; choose another folder, or delete it first.")
    place.mkdir(parents=True, exist_ok=True)
    layout: dict[str, tuple[torch.dtype, int]] = {}
    shards: list[Shard] = []
    rest = iter(samples)
    while chunk := [_tensors(sample) for sample in itertools.islice(rest, samples_per_shard)]:
        layout = layout or {name: (value.dtype, value.dim()) for name, value in chunk[0].items()}
        first = len(shards) * samples_per_shard
        for number, sample in enumerate(chunk):
            _check_layout(sample, layout, first + number)
        shards.append(_write_shard(chunk, place / f"shard-{len(shards):05d}.safetensors"))
    if not shards:
        raise DataError(f"There are no samples to write into {place}.")
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "samples": sum(shard.samples for shard in shards),
        "fields": {name: str(dtype) for name, (dtype, _) in layout.items()},
        "shards": [asdict(shard) for shard in shards],
    }
    new = place / f"{_INDEX}.new"
    new.write_text(json.dumps(index, indent=1), encoding="utf-8")
    new.replace(place / _INDEX)
    return read_index(place)


def read_index(folder: str | os.PathLike[str]) -> ShardIndex:
    """The index of the set in `folder`. Raises `DataError` where there is none, or where a shard is not all there."""
    place = Path(folder)
    path = place / _INDEX
    if not path.is_file():
        raise DataError(f"{place} holds no set of shards: there is no {_INDEX}. Write one with write_shards.")
    text = path.read_bytes()
    try:
        content = json.loads(text)
        if (content["format"], content["version"]) != (_FORMAT, _VERSION):
            raise DataError(
                f"{path} is of the format {content['format']} {content['version']}, not {_FORMAT} {_VERSION}."
            )
        shards = tuple(Shard(**shard) for shard in content["shards"])
        index = ShardIndex(place, dict(content["fields"]), shards, hashlib.sha256(text).hexdigest())
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} can't be read ({error}); write the shards again.") from None
    for shard in index.shards:
        size = (place / shard.file).stat().st_size if (place / shard.file).is_file() else 0
        if size != shard.bytes:
            raise DataError(
                f"{place / shard.file} has {size:,} bytes instead of {shard.bytes:,}; write the shards again."
            )
    return index


class OpenShard:
    """One shard, mapped into memory; the file is compared with its checksum first if `check`."""

    def __init__(self, index: ShardIndex, shard: Shard, *, check: bool) -> None:
        path = index.folder / shard.file
        self._values: dict[str, Tensor] = {}
        self._shapes: dict[str, list[list[int]]] = {}
        self._ends: dict[str, list[int]] = {}
        try:
            if check:
                _check_digest(path, shard)
            with safe_open(path, framework="pt") as file:
                for name in index.fields:
                    shapes = file.get_tensor(name + _SHAPE)
                    self._values[name] = file.get_tensor(name)
                    self._shapes[name] = shapes.tolist()
                    self._ends[name] = [0, *torch.cumsum(shapes.prod(1), 0).tolist()]
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} can't be read ({error}); write the shards again.") from None

    def sample(self, number: int) -> Sample:
        """Sample `number` of the shard, its tensors copied so that the shard can go."""
        sample: Sample = {}
        for name, values in self._values.items():
            first, stop = self._ends[name][number : number + 2]
            sample[name] = values[first:stop].clone().reshape(self._shapes[name][number])
        return sample


def _tensors(sample: Mapping[str, Any]) -> Sample:
    if not sample:
        raise DataError("A sample has no fields: it maps at least one name to a tensor.")
    tensors: Sample = {}
    for name, value in sample.items():
        if name.endswith(_SHAPE):
            raise DataError(f"A field can't be named {name!r}: names that end in {_SHAPE!r} are the format's own.")
        try:
            tensors[name] = torch.as_tensor(value).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"Field {name!r} holds a {type(value).__name__}: a field is a tensor, an array or a number; give text "
                "as token ids, or as its bytes."
            ) from None
    return tensors


def _check_layout(sample: Sample, layout: Mapping[str, tuple[torch.dtype, int]], number: int) -> None:
    found = {name: (value.dtype, value.dim()) for name, value in sample.items()}
    if found != layout:
        raise DataError(
            f"Sample {number} differs from the first in its fields, dtypes or numbers of dims: it has "
            f"{_describe(found)}, the first has {_describe(layout)}."
        )


def _describe(layout: Mapping[str, tuple[torch.dtype, int]]) -> str:
    return ", ".join(
        f"{name} {str(dtype).removeprefix('torch.')} [{dims} dims]" for name, (dtype, dims) in layout.items()
    )


def _write_shard(samples: list[Sample], path: Path) -> Shard:
    tensors: dict[str, Tensor] = {}
    for name in samples[0]:
        tensors[name] = torch.cat([sample[name].reshape(-1) for sample in samples])
        shapes = [list(sample[name].shape) for sample in samples]
        tensors[name + _SHAPE] = torch.tensor(shapes, dtype=torch.int64).reshape(len(samples), -1)
    save_file(tensors, path)
    with path.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return Shard(path.name, len(samples), path.stat().st_size, digest)


def _check_digest(path: Path, shard: Shard) -> None:
    with path.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != shard.sha256:
            raise DataError(f"{path} is damaged: its checksum is not the one in {_INDEX}; write the shards again.")


def spans(ends: list[int], positions: Iterable[int]) -> Iterator[tuple[int, Iterator[int]]]:
    """Group ascending positions by the shard they fall into, where shard i ends before position ends[i]."""
    shard = 0

    def which(position: int) -> int:
        nonlocal shard
        while position >= ends[shard]:
            shard += 1
        return shard

    return itertools.groupby(positions, which)
