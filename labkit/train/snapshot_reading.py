"""`latest_snapshot` and `Snapshot`: the newest snapshot that is whole, and any piece of any tensor in it."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from labkit.collectives.groups import Group
from labkit.mesh import Placement, copy_overlap
from labkit.train import snapshot_files as files
from labkit.train.snapshot_exchange import Exchange, SnapshotError
from labkit.train.snapshot_index import Index, name_of
from labkit.train.snapshot_values import join


class Snapshot:
    """A snapshot that was found whole.

    Attributes:
        path: its folder.
        step: the optimizer step after which this was the state.
        world_size: how many ranks saved it.
        state: the run's state, tensors included.
        names: the names of its tensors.
        refused: newer snapshots that were not whole, each with its reason, for the user to be told.
        bytes_read: bytes of tensors read so far.
    """

    def __init__(self, path: Path, index: Index, refused: list[str]) -> None:
        self.path, self.refused = path, list(refused)
        self.step, self.world_size = index.step, index.world_size
        self.bytes_read = 0
        self._index = index
        self._open: dict[str, Any] = {}
        self.state = join(index.state, _Stored(self, 0))

    @property
    def names(self) -> list[str]:
        return list(self._index.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._index.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of a tensor."""
        return self._known(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._known(name)[1]

    def read(self, name: str, placement: Placement | None = None) -> torch.Tensor:
        """The piece of a tensor that `placement` says, [local_shape], on the CPU; the whole without one. Only what
        overlaps with it is read. Shape and dtype must be those that were saved."""
        shape, dtype = self._known(name)
        wanted = placement or Placement(shape, dtype)
        if (wanted.shape, wanted.dtype) != (shape, dtype):
            raise SnapshotError(
                f"tensor {name!r} of the snapshot is {name_of(dtype)} {list(shape)}, not "
                f"{str(wanted.dtype).removeprefix('torch.')} {list(wanted.shape)}: build the same model"
            )
        local = torch.empty(wanted.local_shape, dtype=dtype)
        for piece in self._index.tensors[name]:
            # a view of the mapped file: what is not copied is not read
            stored = self._stored(piece.file, name)
            self.bytes_read += copy_overlap(local, wanted, stored, piece.placement) * dtype.itemsize
        return local

    def rank_state(self, rank: int) -> Any:
        """What rank `rank` of those that saved it gave as its own state."""
        if not 0 <= rank < self.world_size:
            raise SnapshotError(f"the snapshot was saved by {self.world_size} ranks: there is no state of rank {rank}")
        return join(self._index.ranks[rank], _Stored(self, rank))

    def _known(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name not in self._index.shapes:
            raise SnapshotError(f"the snapshot of step {self.step} has no tensor {name!r}: build the same model")
        return self._index.shapes[name]

    def _stored(self, file: str, key: str) -> torch.Tensor:
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, framework="pt")
            tensor: torch.Tensor = self._open[file].get_tensor(key)
        except Exception as error:  # what a library says of a file that is gone or no longer the same
            raise SnapshotError(
                f"{file} of the snapshot of step {self.step} can't be read any more ({error})"
            ) from None
        return tensor

    def __repr__(self) -> str:
        return f"Snapshot(step {self.step}, {len(self.names)} tensors, saved by {self.world_size} ranks)"


class _Stored(dict[str, torch.Tensor]):
    """The tensors of a state, looked up by key in one rank's file."""

    def __init__(self, snapshot: Snapshot, rank: int) -> None:
        super().__init__()
        self.snapshot, self.rank = snapshot, rank

    def __missing__(self, key: str) -> torch.Tensor:
        return self.snapshot._stored(f"rank-{self.rank}.safetensors", key).clone()


def latest_snapshot(folder: str | Path, *, group: Group = None) -> Snapshot | None:
    """The newest whole snapshot in `folder`, None where there is none yet; every rank of the group calls it together,
    and all get the same one.

    Every checksum is compared, the ranks sharing the files out. A snapshot that is torn or was changed is passed over
    for the one before it, and its reason kept in `refused`. Raises SnapshotError, on every rank, where there are
    snapshots and none of them is whole.
    """
    exchange, folder = Exchange(group), Path(folder)
    refused: list[str] = []
    passed: set[str] = set()
    while True:
        listed = exchange.together(lambda: [path.name for path in files.candidates(folder)], "opening a snapshot")[0]
        remaining = [name for name in listed if name not in passed]
        if not remaining:
            break
        path = folder / remaining[0]
        passed.add(path.name)
        index, reason = _examine(path, exchange)
        found = exchange.gather({"reason": reason, "gone": not path.is_dir()})
        gone = [rank for rank, one in zip(exchange.ranks, found, strict=True) if one["gone"]]
        if len(gone) == len(found):
            continue  # removed meanwhile, since newer ones were saved
        reasons = [f"rank {rank} does not see it (give a folder that all ranks share)" for rank in gone]
        reasons += [one["reason"] for one in found if one["reason"]]
        if index is not None and not reasons:
            return Snapshot(path, index, refused)
        refused.append(f"snapshot {path.name} is not whole: {reasons[0]}")
    if refused:
        raise SnapshotError(f"no snapshot in {folder} can be used: {'; '.join(refused)}")
    return None


def _examine(path: Path, exchange: Exchange) -> tuple[Index | None, str | None]:
    """The index, and what is wrong with it or with this rank's share of the files."""
    try:
        index = files.read_index(path)
        for number, (name, (size, sha256)) in enumerate(index.files.items()):
            if number % len(exchange.ranks) == exchange.place:
                files.check_file(path / name, size, sha256)
    except SnapshotError as error:
        return None, str(error)
    return index, None
