"""Snapshots know no layout: what any ranks saved, any others read, and only what is whole is ever opened."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import DTYPES, filled, layout, line, random_shape
from placed_tensors import weights, whole
from rank_groups import new_group
from torch import nn

from labkit.mesh import Placement
from labkit.ranks import Ranks
from labkit.record import Recorder
from labkit.train import snapshot_files
from labkit.train.snapshot_index import Index
from labkit.train.snapshots import (
    SnapshotError,
    latest_snapshot,
    load_module,
    module_tensors,
    random_states,
    save_snapshot,
    set_random_states,
)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=30) as ranks:
        yield ranks


# --- any layout ---


def chosen(rng: random.Random, ranks: int) -> dict[str, list[Placement]]:
    """Some tensors by name, with the Placement of each rank."""
    found = {}
    for number in range(rng.randint(1, 4)):
        shape, dtype = random_shape(rng), rng.choice(DTYPES)
        found[f"layer.{number}"] = layout(rng, shape, dtype, ranks)
    return found


def save_random_layouts(folder: str, seeds: int) -> None:
    """On four ranks; the first 1, 2, 3 or 4 of them save."""
    groups = {size: new_group(range(size)) for size in range(1, 5)}
    for seed in range(seeds):
        rng = random.Random(seed)
        ranks = rng.randint(1, 4)
        if (rank := dist.get_rank()) < ranks:
            mine = {name: each[rank] for name, each in chosen(rng, ranks).items()}
            tensors = {name: (held.take(filled(held.shape, held.dtype)), held) for name, held in mine.items()}
            save_snapshot(Path(folder) / str(seed), seed, tensors=tensors, group=groups[ranks])


def test_what_any_layout_saved_any_other_reads_to_the_bit_and_reads_no_more(four: Ranks, tmp_path: Path) -> None:
    seeds = 40
    four.run(save_random_layouts, str(tmp_path), seeds)
    for seed in range(seeds):
        snapshot = latest_snapshot(tmp_path / str(seed))
        assert snapshot is not None and snapshot.step == seed and snapshot.refused == []
        rng = random.Random(seed)
        ranks = rng.randint(1, 4)
        assert snapshot.world_size == ranks
        tensors = chosen(rng, ranks)
        assert sorted(snapshot.names) == sorted(tensors)
        for name, (held, *_) in tensors.items():
            full = filled(held.shape, held.dtype)
            assert snapshot.read(name).equal(full) and snapshot.read(name).dtype == held.dtype
            for wanted in layout(rng, held.shape, held.dtype, rng.randint(1, 4)):
                before = snapshot.bytes_read
                assert snapshot.read(name, wanted).equal(wanted.take(full))
                assert snapshot.bytes_read - before == wanted.nbytes


def save_replicas(folder: str) -> tuple[int, int]:
    tensors = {f"w{number}": whole(torch.full((100, 10), float(number))) for number in range(8)}
    with Recorder() as record:
        save_snapshot(folder, 1, tensors=tensors)
    return record.bytes_sent, record.control_bytes


def test_copies_are_written_once_shared_out_between_the_ranks(four: Ranks, tmp_path: Path) -> None:
    traffic = four.run(save_replicas, str(tmp_path))
    sizes = [(tmp_path / "step-0000000001" / f"rank-{rank}.safetensors").stat().st_size for rank in range(4)]
    assert all(2 * 4000 <= size < 2 * 4000 + 400 for size in sizes)
    # the ranks agree by control traffic
    assert all(payload == 0 and control > 0 for payload, control in traffic)


def test_reading_a_piece_of_a_large_tensor_does_not_load_it(tmp_path: Path) -> None:
    import psutil

    full = torch.zeros(4096, 4096)
    save_snapshot(tmp_path, 1, tensors={"w": whole(full)})
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None
    del full
    before = psutil.Process().memory_info().rss
    piece = snapshot.read("w", Placement((4096, 4096), torch.float32).sharded(0, line(256, 3)))
    assert piece.shape == (16, 4096)
    assert psutil.Process().memory_info().rss - before < 16e6 < 64 * 2**20


# --- several ranks open ---


def save_twice(folder: str) -> None:
    for step in (1, 2):
        save_snapshot(folder, step, tensors=weights(step))


def open_together(folder: str) -> Any:
    checked: list[str] = []
    check_file = snapshot_files.check_file

    def counted(path: Path, size: int, sha256: str) -> None:
        checked.append(f"{path.parent.name[-1]} {path.name}")
        check_file(path, size, sha256)

    snapshot_files.check_file = counted
    try:
        snapshot = latest_snapshot(folder)
    finally:
        snapshot_files.check_file = check_file
    assert snapshot is not None
    placement = Placement((50, 20), torch.float32).sharded(1, None)
    return snapshot.step, snapshot.refused, checked, placement, snapshot.read("w", placement)


def test_ranks_share_the_checks_and_open_the_same_snapshot_even_if_one_alone_sees_the_fault(
    four: Ranks, tmp_path: Path
) -> None:
    four.run(save_twice, str(tmp_path))
    path = tmp_path / "step-0000000002" / "rank-3.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = torch.zeros(50, 20)
    for rank, (step, refused, checked, placement, piece) in enumerate(four.run(open_together, str(tmp_path))):
        assert step == 1 and "rank-3.safetensors was changed" in refused[0]
        assert checked == [f"2 rank-{rank}.safetensors", f"1 rank-{rank}.safetensors"]
        placement.put(again, piece)
    assert again.equal(torch.ones(50, 20))


# --- states ---


def test_the_states_of_the_run_and_of_each_rank_come_back(two: Ranks, tmp_path: Path) -> None:
    def save(folder: str) -> list[float]:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        random.seed(rank)
        import numpy

        numpy.random.seed(rank)
        numpy.random.randn(3)  # leaves a number in store
        random.gauss()
        state = {"scale": torch.tensor(3.0, dtype=torch.float64), "list": [1, 2.5, None, True, "é"], "rank": rank}
        save_snapshot(folder, 1, tensors={}, state=state, rank_state={"random": random_states(), "rank": rank})
        return [torch.rand(1).item(), random.random(), random.gauss(), *numpy.random.randn(2).tolist()]

    drawn = two.run(save, str(tmp_path))
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None
    assert snapshot.state == {"scale": torch.tensor(3.0), "list": [1, 2.5, None, True, "é"], "rank": 0}
    assert snapshot.state["scale"].dtype == torch.float64
    import numpy

    before = random_states()
    for rank in range(2):
        state = snapshot.rank_state(rank)
        assert state["rank"] == rank
        set_random_states(state["random"])
        again = [torch.rand(1).item(), random.random(), random.gauss(), *numpy.random.randn(2).tolist()]
        assert again == drawn[rank]
    set_random_states(before)
    with pytest.raises(SnapshotError, match="saved by 2 ranks: there is no state of rank 2"):
        snapshot.rank_state(2)


def test_a_module_comes_back_with_its_buffers_and_a_tied_parameter_is_kept_once(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False), nn.Linear(3, 2))
        model[2].weight = model[0].weight
        model.register_buffer("passing", torch.rand(2), persistent=False)
        model[3].weight.requires_grad_(False)
        return model

    model = build()
    model[1](torch.randn(8, 3))
    tensors = module_tensors(model)
    assert sorted(tensors) == sorted(
        "model." + name
        for name in (
            "0.weight", "1.weight", "1.bias", "3.weight", "3.bias",
            "1.running_mean", "1.running_var", "1.num_batches_tracked",
        )
    )  # fmt: skip
    save_snapshot(tmp_path, 1, tensors=tensors)
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None
    other = build()
    load_module(other, snapshot)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert other[2].weight is other[0].weight
    with pytest.raises(
        SnapshotError, match=r"model.0.weight' of the snapshot is float32 \[5, 3\], not float32 \[6, 3\]"
    ):
        load_module(nn.Sequential(nn.Embedding(6, 3)), snapshot)
    with pytest.raises(SnapshotError, match=r"the snapshot of step 1 has no tensor 'model\.1\.0\.weight'"):
        load_module(nn.Sequential(nn.Embedding(5, 3), nn.Sequential(nn.Linear(2, 2))), snapshot)


def test_tensors_of_any_stride_sharing_memory_are_kept(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    views = {"t": base.t(), "column": base[:, 2], "same": base, "again": base, "expanded": base[:1].expand(3, 6)}
    save_snapshot(tmp_path, 1, tensors={name: whole(view) for name, view in views.items()})
    snapshot = latest_snapshot(tmp_path)
    assert snapshot is not None
    assert all(snapshot.read(name).equal(view) for name, view in views.items())


def test_names_and_dtypes_that_can_not_be_kept_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="dtype complex128 can't be kept in a snapshot; convert it first"):
        save_snapshot(tmp_path, 1, tensors={"w": whole(torch.zeros(2, dtype=torch.complex128))})
    with pytest.raises(SnapshotError, match="names that begin with run_state or rank_state are taken"):
        save_snapshot(tmp_path, 1, tensors={"run_state.x": whole(torch.zeros(2))})
    with pytest.raises(SnapshotError, match="run_state has the key 1: give strings as keys"):
        save_snapshot(tmp_path, 1, tensors={}, state={1: 2})
    assert latest_snapshot(tmp_path) is None


def test_the_index_reads_back_what_it_wrote() -> None:
    index = Index(3, 2, state={"lr": 1e-5, "nan": float("inf")}, ranks=[None, [1]])
    index.files = {"rank-0.safetensors": (3, "ab")}
    again = Index.from_text(index.to_text())
    assert again == index and json.loads(index.to_text())["content"]["step"] == 3
