"""Saving a run, and going on from where it was: model, optimizer, scaler, place in the data, random numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labkit.train.config import TrainConfig
from labkit.train.settings import ConfigError
from labkit.train.snapshots import (
    Snapshot,
    latest_snapshot,
    load_module,
    load_optimizer,
    module_tensors,
    optimizer_tensors,
    random_states,
    save_snapshot,
    set_random_states,
)
from labkit.train.strategies import Strategy

#: settings that may be others when a run goes on: they don't change what was learned so far
FREE = {
    "steps", "epochs", "dp", "pp", "tp", "zero", "backend", "timeout", "workers", "eval_every", "snapshot_every",
    "accumulate", "checkpoint", "pp_schedule", "micro_batches", "test_limit", "folder", "data_folder", "resume",
    "progress",
}  # fmt: skip


def snapshots_in(config: TrainConfig) -> Path:
    """Where the run's snapshots are."""
    return Path(config.folder) / "snapshots"


def save(config: TrainConfig, strategy: Strategy, step: int, data: dict[str, Any]) -> Path:
    """Save the state after `step` steps; all ranks call it together. `data` is the place in the data."""
    strategy.synchronise_buffers()
    moments, settings = optimizer_tensors(strategy.snapshot_optimizer, strategy.stepped())
    scaler = {} if strategy.scaler is None else strategy.scaler.state_dict()
    return save_snapshot(
        snapshots_in(config),
        step,
        tensors=module_tensors(strategy.model) | moments,
        state={"optimizer": settings, "scaler": scaler, "data": data, "config": dict(config.as_dict())},
        rank_state=random_states(),
    )


def find(config: TrainConfig) -> Snapshot | None:
    """The newest snapshot of the run, None where it starts anew; all ranks call it together.

    Raises ConfigError where snapshots are there and `resume` is not set, or where another run made them.
    """
    if not config.folder:
        return None
    snapshot = latest_snapshot(snapshots_in(config))
    if snapshot is None:
        return None
    if not config.resume:
        raise ConfigError(
            f"folder={config.folder} holds the snapshots of an earlier run: give resume=true to go on from step "
            f"{snapshot.step}, or another folder"
        )
    before, now = snapshot.state["config"], config.as_dict()
    for name, value in now.items():
        if name not in FREE and before.get(name, value) != value:
            raise ConfigError(
                f"resume: {name}={value}, but the run in folder={config.folder} has {name}={before[name]}: give the "
                "same, or another folder"
            )
    return snapshot


def restore(snapshot: Snapshot, strategy: Strategy, seed: int) -> dict[str, Any]:
    """Put the state of the snapshot into the strategy's model and optimizer; returns the place in the data.

    With as many ranks as it was saved by, each goes on with its own random numbers; else, or where ranks that must draw
    the same did not before, with new ones.
    """
    load_module(strategy.model, snapshot)
    load_optimizer(strategy.snapshot_optimizer, strategy.stepped(), snapshot, snapshot.state["optimizer"])
    if strategy.scaler is not None:
        strategy.scaler.load_state_dict(snapshot.state["scaler"])
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shared_before = snapshot.state["config"].get("tp", 1) > 1
    if snapshot.world_size == world_size and shared_before == strategy.same_random_numbers:
        set_random_states(snapshot.rank_state(rank))
    else:
        seed_rank(seed, 0 if strategy.same_random_numbers else rank, snapshot.step)
    data: dict[str, Any] = snapshot.state["data"]
    return data


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Give a rank random numbers of its own, for dropout: unrelated for neighbouring seeds, ranks and steps."""
    torch.manual_seed(int(np.random.SeedSequence((seed, rank, step)).generate_state(1, np.uint64)[0]))
