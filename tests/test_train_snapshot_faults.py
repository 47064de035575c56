"""Only what is whole is ever opened, and whatever goes wrong while saving, what was saved before stays."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from placed_tensors import names_in, weights, whole
from rank_groups import new_group
from safetensors import SafetensorError

from labkit.mesh import Placement
from labkit.ranks import RankError, Ranks
from labkit.train import snapshot_files
from labkit.train.snapshot_index import INDEX, Index
from labkit.train.snapshots import (
    SnapshotError,
    latest_snapshot,
    random_states,
    save_snapshot,
)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=30) as ranks:
        yield ranks


# --- whole or not there ---


def test_a_byte_changed_anywhere_is_refused_and_the_one_before_is_used(tmp_path: Path) -> None:
    save_snapshot(tmp_path, 1, tensors=weights(1), state={"lr": 1e-5}, rank_state=random_states())
    save_snapshot(tmp_path, 2, tensors=weights(2), state={"lr": 1e-5}, rank_state=random_states())
    rng = random.Random(0)
    for number in range(60):
        path = tmp_path / "step-0000000002" / (INDEX, "rank-0.safetensors")[number % 2]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        snapshot = latest_snapshot(tmp_path)
        assert snapshot is not None and snapshot.step == 1 and snapshot.read("w").unique().tolist() == [1]
        (reason,) = snapshot.refused
        assert reason.startswith(f"snapshot step-0000000002 is not whole: {path.name} ") and "\n" not in reason
        path.write_bytes(good)
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None and snapshot.step == 2 and snapshot.refused == []


@pytest.mark.parametrize("file", [INDEX, "rank-0.safetensors"])
def test_a_file_torn_at_any_place_or_missing_is_refused_with_its_reason(tmp_path: Path, file: str) -> None:
    save_snapshot(tmp_path, 1, tensors=weights(1))
    save_snapshot(tmp_path, 2, tensors=weights(2))
    path = tmp_path / "step-0000000002" / file
    good = path.read_bytes()
    rng = random.Random(0)
    for length in [0, 1, len(good) - 1, *(rng.randrange(len(good)) for _ in range(20))]:
        path.write_bytes(good[:length])
        snapshot = latest_snapshot(tmp_path)
        assert snapshot is not None and snapshot.step == 1
        told = "is torn" if file == INDEX else f"rank-0.safetensors has {length} bytes, not {len(good)}"
        assert told in snapshot.refused[0]
    path.unlink()
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None and snapshot.step == 1 and f"{file} is missing" in snapshot.refused[0]


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\x00", b'{"format": "another"}'])
def test_something_else_in_the_place_of_the_index_is_refused(tmp_path: Path, content: bytes) -> None:
    save_snapshot(tmp_path, 1, tensors=weights(1))
    (tmp_path / "step-0000000001" / INDEX).write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        latest_snapshot(tmp_path)
    assert str(caught.value).startswith(f"no snapshot in {tmp_path} can be used: snapshot step-0000000001 is not whole")
    assert "\n" not in str(caught.value)


def test_where_there_is_none_yet_there_is_none(tmp_path: Path) -> None:
    assert latest_snapshot(tmp_path / "nowhere") is None
    assert latest_snapshot(tmp_path) is None
    (tmp_path / ".saving-1234").mkdir()
    (tmp_path / "step-of-another-kind").mkdir()
    assert latest_snapshot(tmp_path) is None


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save_snapshot(tmp_path, 1, tensors=weights(1))
    bomb = pickle.dumps(Bomb())
    (path / "rank-0.safetensors").write_bytes(bomb)
    index = snapshot_files.read_index(path)
    index.files["rank-0.safetensors"] = len(bomb), snapshot_files.digest(path / "rank-0.safetensors")
    (path / INDEX).write_text(index.to_text())
    snapshot = latest_snapshot(tmp_path)  # its checksums are right
    assert snapshot is not None
    with pytest.raises(SnapshotError, match=r"rank-0.safetensors of the snapshot of step 1 can't be read any more"):
        snapshot.read("w")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content["files"].update({"../../x": {"bytes": 1, "sha256": ""}}), "no file of a snapshot"),
        (lambda content: content["tensors"]["w"].update(dtype="object"), "makes no sense"),
        (lambda content: content["tensors"]["w"].update(shape=[51, 20]), "hold 1000 of its 1020 elements"),
        (lambda content: content["tensors"]["w"].update(shape=[5, 2]), "dim 0 is cut from 0 to 50"),
        (lambda content: content["tensors"]["w"]["pieces"][0].update(file="rank-7.safetensors"), "is not listed"),
        (lambda content: content.pop("world_size"), "makes no sense"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    path = save_snapshot(tmp_path, 1, tensors=weights(1))
    text = (path / INDEX).read_text()
    content = json.loads(text)["content"]
    change(content)
    from labkit.train.snapshot_index import _head

    (path / INDEX).write_text(_head(json.dumps(content)) + json.dumps(content) + "}")
    with pytest.raises(SnapshotError, match=sentence):
        latest_snapshot(tmp_path)


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = snapshot_files.sync, Path.rename

    def seen_sync(path: Path) -> None:
        sync(path)
        done.append(f"sync {path.name[:8]}")

    def seen_rename(path: Path, to: Path) -> Path:
        done.append(f"rename {to.name[:5]}")
        return rename(path, to)

    monkeypatch.setattr(snapshot_files, "sync", seen_sync)
    monkeypatch.setattr(Path, "rename", seen_rename)
    save_snapshot(tmp_path, 1, tensors=weights(1))
    assert done == ["sync rank-0.s", "sync index.js", "sync .saving-", "rename step-", f"sync {tmp_path.name[:8]}"]


# --- when saving fails ---


def test_a_full_disk_is_told_in_one_sentence_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_snapshot(tmp_path, 1, tensors=weights(1))

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot_files, "save_file", full)
        with pytest.raises(SnapshotError, match=r"^saving the snapshot of step 2 failed: .*No space left on device"):
            save_snapshot(tmp_path, 2, tensors=weights(2))
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_files, "write_text", full)
        with pytest.raises(SnapshotError, match=r"^saving the snapshot of step 2 failed: .*No space left on device"):
            save_snapshot(tmp_path, 2, tensors=weights(2))
    assert names_in(tmp_path) == ["step-0000000001"]
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None and snapshot.step == 1 and snapshot.refused == []


def save_with_a_limit(folder: str) -> str:
    """Rank 1 may write files of 4 kB only; a real error of the operating system."""
    import resource

    tensors = {f"w{rank}": (torch.ones(5000), Placement((5000,), torch.float32)) for rank in range(2)}
    save_snapshot(folder, 1, tensors=tensors)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        save_snapshot(folder, 2, tensors=tensors)
    except SnapshotError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


def test_a_rank_that_can_not_write_ends_the_saving_on_all(two: Ranks, tmp_path: Path) -> None:
    told = two.run(save_with_a_limit, str(tmp_path))
    assert told[0] == told[1] and told[0].startswith("saving the snapshot of step 2 failed on rank 1: ")
    assert "File too large" in told[0]
    assert names_in(tmp_path) == ["step-0000000001"]


def save_nonsense(folder: str, what: str) -> None:
    rank = dist.get_rank()
    value = torch.zeros(6)
    placement, step, state = Placement.of(value), 1, None
    if what == "gap":
        placement = placement.sharded_flat(3 * rank, 3 * rank + 2, None)
        value = value[:2]
    elif what == "overlap":
        placement = placement.sharded_flat(2 * rank, 2 * rank + 4, None)
        value = value[:4]
    elif what == "shape" and rank == 1:
        value = value.view(2, 3)
    elif what == "dtypes" and rank == 1:
        value = value.double()
        placement = Placement.of(value)
    elif what == "step":
        step = rank
    elif what == "state" and rank == 1:
        state = {"when": {1, 2}}
    elif what == "folder":
        folder = f"{folder}/{rank}"
    save_snapshot(folder, step, tensors={"w": (value, placement)}, rank_state=state)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("gap", "tensor 'w': its pieces hold 4 of its 6 elements"),
        ("overlap", "tensor 'w': pieces overlap"),
        ("shape", r"on rank 1: tensor 'w' is float32 \[2, 3\], but its Placement says float32 \[6\]"),
        ("dtypes", r"the ranks disagree about its shape or dtype: float32 \[6\] and float64 \[6\]"),
        ("step", "the ranks save different steps, 0 and 1"),
        ("state", "on rank 1: rank_state.when is a set"),
        ("folder", "on rank 1: this rank does not see the folder"),
    ],
)
def test_what_can_not_be_saved_is_refused_on_all_ranks_and_nobody_waits(
    two: Ranks, tmp_path: Path, what: str, sentence: str
) -> None:
    with pytest.raises(RankError, match=sentence) as caught:
        two.run(save_nonsense, str(tmp_path), what)
    assert caught.value.ranks == [0, 1]
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and path.name not in ("0", "1")]


def open_what_one_rank_sees(folder: str) -> None:
    latest_snapshot(folder if dist.get_rank() == 0 else folder + "/elsewhere")


def test_a_folder_that_a_rank_does_not_see_is_told(two: Ranks, tmp_path: Path) -> None:
    save_snapshot(tmp_path, 1, tensors=weights(1))
    sentence = r"snapshot step-0000000001 is not whole: rank 1 does not see it \(give a folder that all ranks share\)"
    with pytest.raises(RankError, match=sentence) as caught:
        two.run(open_what_one_rank_sees, str(tmp_path))
    assert caught.value.type == "SnapshotError"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [({"keep": 0}, "keep is 0"), ({"step": -1}, "step is -1"), ({"step": 1.5}, "step is 1.5")],
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        save_snapshot(tmp_path, **{"step": 1, "tensors": {}, **arguments})


# --- how many stay ---


def test_the_newest_stay_and_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".saving-of-a-killed-process").mkdir()
    for step in (1, 2, 3):
        save_snapshot(tmp_path, step, tensors=weights(step))
    assert names_in(tmp_path) == ["notes.txt", "step-0000000002", "step-0000000003"]
    save_snapshot(tmp_path, 4, tensors=weights(4), keep=1)
    assert names_in(tmp_path) == ["notes.txt", "step-0000000004"]


def test_a_step_saved_again_is_the_newer_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        save_snapshot(tmp_path, 5, tensors={"w": whole(torch.tensor([value]))}, keep=2)
        snapshot = latest_snapshot(tmp_path)
        assert snapshot is not None and snapshot.step == 5 and snapshot.read("w").tolist() == [value]
    assert len(names_in(tmp_path)) == 2


def test_one_that_goes_is_at_no_moment_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append(path.name))
    for step in (1, 2, 3):
        save_snapshot(tmp_path, step, tensors=weights(step))
    (gone,) = (name for name in removed if (tmp_path / name).exists())
    assert gone.startswith(".removing-") and (tmp_path / gone / INDEX).exists()
    assert [name for name in names_in(tmp_path) if name.startswith("step")] == ["step-0000000002", "step-0000000003"]


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    save_snapshot(tmp_path, 9, tensors=weights(9))
    (tmp_path / "step-0000000009" / INDEX).unlink()
    save_snapshot(tmp_path, 4, tensors=weights(4), keep=1)
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None and snapshot.step == 4 and len(snapshot.refused) == 1


def test_one_that_was_removed_while_it_was_checked_is_passed_over_for_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_snapshot(tmp_path, 1, tensors=weights(1))
    read_index = snapshot_files.read_index

    def read_late(path: Path) -> Index:
        if path.name == "step-0000000001":  # meanwhile the run goes on
            save_snapshot(tmp_path, 2, tensors=weights(2), keep=1)
        return read_index(path)

    monkeypatch.setattr(snapshot_files, "read_index", read_late)
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None and snapshot.step == 2 and snapshot.refused == []


def test_a_snapshot_that_is_removed_while_it_is_read_ends_in_a_sentence(tmp_path: Path) -> None:
    path = save_snapshot(tmp_path, 1, tensors=weights(1))
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None
    shutil.rmtree(path)
    with pytest.raises(SnapshotError, match="can't be read any more"):
        snapshot.read("w")


def save_and_read_at_once(folder: str, steps: int) -> list[int]:
    """Ranks 0 and 1 are two jobs that save into one folder, ranks 2 and 3 read meanwhile, each on its own."""
    rank = dist.get_rank()
    alone = [new_group([one]) for one in range(4)][rank]
    seen = []
    for turn in range(steps):
        step = 2 * turn + rank
        if rank < 2:
            save_snapshot(folder, step, tensors=weights(step), group=alone)
        elif (snapshot := latest_snapshot(folder, group=alone)) is not None:
            assert snapshot.refused == []
            seen.append(snapshot.step)
    return seen


def test_two_jobs_may_save_into_one_folder_while_others_read(four: Ranks, tmp_path: Path) -> None:
    seen = four.run(save_and_read_at_once, str(tmp_path), 25)
    assert seen[2] == sorted(seen[2]) and seen[3] == sorted(seen[3])
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None and snapshot.step == 49 and snapshot.refused == []
    assert len(names_in(tmp_path)) == 2
