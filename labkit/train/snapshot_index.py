"""The index of a snapshot: every tensor's global shape and dtype, which file holds which piece, and all other state.

One JSON file, which carries the checksum of its own content and of every other file.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from labkit.mesh import Placement, partition_fault
from labkit.train.snapshot_exchange import SnapshotError

FORMAT = "labkit-snapshot-1"
INDEX = "index.json"
_HEAD = '{{"format": "{format}", "sha256": '
_FILE = re.compile(r"rank-\d+\.safetensors")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
    )
}  # fmt: skip


def name_of(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32. One that a snapshot can't hold is refused."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"a tensor of dtype {name} can't be kept in a snapshot; convert it first")
    return name


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and the file that holds it under the tensor's name."""

    placement: Placement
    file: str


@dataclass
class Index:
    """All that is known of a snapshot but the tensors' values. `files` has each one's bytes and SHA-256."""

    step: int
    world_size: int
    tensors: dict[str, list[Piece]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    state: Any = None
    ranks: list[Any] = field(default_factory=list)

    def to_text(self) -> str:
        """As JSON, with the checksum."""
        content = {
            "step": self.step,
            "world_size": self.world_size,
            "tensors": {
                name: {
                    "shape": list(shape),
                    "dtype": name_of(dtype),
                    "pieces": [{"file": piece.file, **cut(piece.placement)} for piece in self.tensors[name]],
                }
                for name, (shape, dtype) in self.shapes.items()
            },
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()},
            "state": self.state,
            "ranks": self.ranks,
        }
        text = json.dumps(content)
        return f"{_head(text)}{text}}}"

    @staticmethod
    def from_text(text: str) -> "Index":
        """The index that `to_text` wrote; anything else is refused with a SnapshotError that says why."""
        if not text.startswith(_HEAD.format(format=FORMAT)):
            raise SnapshotError(f"{INDEX} is torn or not of the format {FORMAT}")
        content = text[len(_head("")) : -1]
        if f"{_head(content)}{content}}}" != text:
            raise SnapshotError(f"{INDEX} is torn, or was changed after it was written (its checksum differs)")
        try:
            return _from_content(json.loads(content))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(f"{INDEX} makes no sense ({error})") from None


def cut(placement: Placement) -> dict[str, Any]:
    """What a piece is of its tensor, as JSON."""
    return {"slices": [list(pair) for pair in placement.slices], "flat": placement.flat and list(placement.flat)}


def uncut(shape: list[int], dtype: str, slices: list[list[int]], flat: list[int] | None) -> Placement:
    """The Placement, without axes, that `cut` described."""
    pairs = tuple((start, stop) for start, stop in slices)
    return Placement(tuple(shape), DTYPES[dtype], pairs, None if flat is None else (flat[0], flat[1]))


def _head(content: str) -> str:
    """What stands before the content; with a brace after it the text is JSON, and every byte of it is checked."""
    digest = hashlib.sha256(content.encode()).hexdigest()
    return f'{_HEAD.format(format=FORMAT)}"{digest}", "content": '


def _from_content(content: Any) -> Index:
    index = Index(int(content["step"]), int(content["world_size"]), state=content["state"], ranks=content["ranks"])
    for name, one in content["files"].items():
        if not _FILE.fullmatch(name):
            raise ValueError(f"no file of a snapshot is called {name!r}")
        index.files[name] = int(one["bytes"]), str(one["sha256"])
    for name, one in content["tensors"].items():
        shape, dtype = one["shape"], one["dtype"]
        pieces = [Piece(uncut(shape, dtype, piece["slices"], piece["flat"]), piece["file"]) for piece in one["pieces"]]
        if fault := partition_fault([piece.placement for piece in pieces]) if pieces else None:
            raise ValueError(f"tensor {name!r}: {fault}")
        if missing := [piece.file for piece in pieces if piece.file not in index.files]:
            raise ValueError(f"tensor {name!r} is in {missing[0]!r}, which is not listed")
        index.shapes[name], index.tensors[name] = (tuple(shape), DTYPES[dtype]), pieces
    return index
