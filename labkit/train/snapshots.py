"""Snapshots free of layout: saved by ranks that each hold pieces, opened by any other number of ranks that hold others.

A snapshot is a folder with one safetensors file a rank and one JSON index. Nothing in it is unpickled. The folder is
one that all ranks see.

    snapshots/
      step-0000000100/            renamed to this name when all of it was on the disk
        index.json                tensors, their pieces, checksums, state
        rank-0.safetensors ...    what each rank wrote; a piece that several hold is written by one of them
      .lock, .saving-..., .removing-...

Saving and opening, on every rank together (no Placement of our own to make: each parameter carries its own):

    parameters = dict(model.named_parameters())
    moments, settings = optimizer_tensors(optimizer, parameters)
    save_snapshot("snapshots", step, tensors=module_tensors(model) | moments,
                  state={"optimizer": settings, "sampler": sampler_state, "schedule": schedule_state},
                  rank_state=random_states())

    snapshot = latest_snapshot("snapshots")  # None where there is none
    if snapshot is not None:
        load_module(model, snapshot)
        load_optimizer(optimizer, parameters, snapshot, snapshot.state["optimizer"])
        set_random_states(snapshot.rank_state(rank))
"""

from labkit.train.snapshot_exchange import SnapshotError as SnapshotError
from labkit.train.snapshot_modules import load_module as load_module
from labkit.train.snapshot_modules import module_tensors as module_tensors
from labkit.train.snapshot_optimizer import load_optimizer as load_optimizer
from labkit.train.snapshot_optimizer import optimizer_tensors as optimizer_tensors
from labkit.train.snapshot_reading import Snapshot as Snapshot
from labkit.train.snapshot_reading import latest_snapshot as latest_snapshot
from labkit.train.snapshot_saving import save_snapshot as save_snapshot
from labkit.train.snapshot_values import random_states as random_states
from labkit.train.snapshot_values import set_random_states as set_random_states
