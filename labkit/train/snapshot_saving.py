"""`save_snapshot`: each rank writes pieces that it holds; the first adds the index and makes all visible at once."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from labkit.collectives.groups import Group
from labkit.mesh import Placement, partition_fault
from labkit.train import snapshot_files as files
from labkit.train.snapshot_exchange import Exchange, SnapshotError
from labkit.train.snapshot_index import INDEX, Index, Piece, cut, name_of, uncut
from labkit.train.snapshot_values import split

Placed: TypeAlias = tuple[torch.Tensor, Placement]
_RUN, _RANK = "run_state", "rank_state"


def save_snapshot(
    folder: str | Path,
    step: int,
    *,
    tensors: Mapping[str, Placed],
    state: Any = None,
    rank_state: Any = None,
    group: Group = None,
    keep: int = 2,
) -> Path:
    """Save the state of a run; every rank of the group calls it together. Returns the snapshot's folder when it is on
    the disk. However it ends, the snapshots before it stay whole until then.

    Args:
        folder: where the snapshots are, on every rank the same place.
        step: the optimizer step after which this is the state; names the snapshot.
        tensors: by global name, the piece that this rank holds and its Placement. Pieces that several ranks hold are
            taken from one of them; all together they must make up each tensor.
        state: the run's own, from the group's first rank: numbers, texts, lists, dicts with text keys, and tensors.
        rank_state: this rank's own, of the same kind, such as `random_states()`.
        group: the ranks that hold the model; None means the world, or this process where there is no other.
        keep: how many of the newest snapshots stay, 1 or more.

    Raises SnapshotError, on every rank, in one sentence: a rank could not write, the pieces leave gaps or overlap, a
    tensor is not as its Placement says.
    """
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"save_snapshot: keep is {keep!r}; give how many snapshots stay, 1 or more")
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"save_snapshot: step is {step!r}; give a whole number, 0 or more")
    exchange, folder = Exchange(group), Path(folder)
    what = f"saving the snapshot of step {step}"
    extra: dict[str, torch.Tensor] = {}

    def describe() -> Any:
        told = {name: _describe(name, *placed) for name, placed in tensors.items()}
        run = split(state, extra, _RUN) if exchange.is_first else None
        return {"step": step, "tensors": told, "run": run, "rank": split(rank_state, extra, _RANK)}

    described = exchange.together(describe, what)
    index = _plan(described, what)

    with contextlib.ExitStack() as stack:

        def begin() -> str | None:
            if not exchange.is_first:
                return None
            stack.enter_context(files.locked(folder))
            saving = files.begin(folder)
            stack.callback(shutil.rmtree, saving, ignore_errors=True)  # does nothing once it has its name
            return saving.name

        def write() -> tuple[int, str]:
            if not saving.is_dir():
                raise SnapshotError(f"this rank does not see the folder {folder}: give one that all ranks share")
            name = _file(exchange.place)
            mine = {
                key: tensors[key][0]
                for key, pieces in index.tensors.items()
                if any(piece.file == name and piece.placement.numel for piece in pieces)
            }
            return files.write_tensors(saving / name, mine | extra)

        def finish() -> str | None:
            if not exchange.is_first:
                return None
            index.files = {_file(place): (size, digest) for place, (size, digest) in enumerate(written)}
            files.write_text(saving / INDEX, index.to_text())
            target = files.publish(saving, step)
            for old in files.candidates(folder)[keep:]:
                if old != target:  # whatever a run that went back to an earlier step finds here
                    files.remove(old)
            return target.name

        saving = folder / exchange.together(begin, what)[0]
        written = exchange.together(write, what)
        return folder / str(exchange.together(finish, what)[0])


def _file(place: int) -> str:
    return f"rank-{place}.safetensors"


def _describe(name: str, tensor: torch.Tensor, placement: Placement) -> Any:
    if name.startswith((f"{_RUN}.", f"{_RANK}.")) or name in (_RUN, _RANK):
        raise ValueError(f"tensor {name!r}: names that begin with {_RUN} or {_RANK} are taken, give another")
    if tuple(tensor.shape) != placement.local_shape or tensor.dtype != placement.dtype:
        raise ValueError(
            f"tensor {name!r} is {name_of(tensor.dtype)} {list(tensor.shape)}, but its Placement says "
            f"{name_of(placement.dtype)} {list(placement.local_shape)}"
        )
    return {"shape": list(placement.shape), "dtype": name_of(placement.dtype), **cut(placement)}


def _plan(described: list[Any], what: str) -> Index:
    """Which rank writes which piece: one of those that hold it, the one with the least to write so far. Every rank
    comes to the same plan, or to the same error."""
    if len(steps := sorted({one["step"] for one in described})) > 1:
        raise SnapshotError(
            f"saving a snapshot failed: the ranks save different steps, {' and '.join(map(str, steps))}"
        )
    index = Index(described[0]["step"], len(described), state=described[0]["run"])
    index.ranks = [one["rank"] for one in described]
    load = [0] * len(described)
    for name in sorted({name for one in described for name in one["tensors"]}):
        holders: dict[str, list[int]] = {}
        for place, one in enumerate(described):
            if name in one["tensors"]:
                holders.setdefault(json.dumps(one["tensors"][name]), []).append(place)
        placements = {text: uncut(**json.loads(text)) for text in holders}
        if fault := partition_fault(list(placements.values())):
            raise SnapshotError(f"{what} failed: tensor {name!r}: {fault}")
        first = next(iter(placements.values()))
        index.shapes[name], index.tensors[name] = (first.shape, first.dtype), []
        for text, placement in placements.items():
            if placement.numel:
                writer = min(holders[text], key=lambda place: load[place])
                load[writer] += placement.nbytes
                index.tensors[name].append(Piece(placement, _file(writer)))
    return index
