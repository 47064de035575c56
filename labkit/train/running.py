"""`train`: where a run takes place. In this process, on ranks of its own, or on the ranks that are here already."""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from labkit.collectives.settings import configure
from labkit.data.errors import DataError
from labkit.memory import checkpoint_blocks
from labkit.ranks import RankError, Ranks
from labkit.ranks.output import is_live
from labkit.record import set_rank
from labkit.train.computing import Computing
from labkit.train.config import TrainConfig
from labkit.train.contradictions import policy_of
from labkit.train.data_parallel import DataParallel
from labkit.train.loop import Loop
from labkit.train.optimizers import optimizer_maker
from labkit.train.pipeline import PipelineParallel
from labkit.train.results import TrainResult
from labkit.train.settings import ConfigError
from labkit.train.snapshot_exchange import SnapshotError
from labkit.train.stopping import StopRequest, listening
from labkit.train.strategies import Strategy
from labkit.train.tensor import TensorParallel
from labkit.train.workloads import make_workload
from labkit.train.zero import ShardedModel, ShardedOptimizer

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets for each process


def train(config: TrainConfig) -> TrainResult:
    """Train as `config` says, and return what came of it.

    Called in a notebook or script it starts dp x pp x tp ranks and ends them again; one rank is this process itself.
    Called on ranks, or under torchrun, where every process calls it, it trains on those, and dp is what remains of
    their number; `state_dict` is then filled on rank 0 only.

    Ctrl-C and SIGTERM end the run after the running step, with a snapshot where there is a folder; a second one ends
    it at once. Raises ConfigError, DataError or SnapshotError, in one sentence, and RankError where a rank fails.
    """
    if dist.is_initialized():
        return train_here(_on_these_ranks(config, dist.get_world_size()), StopRequest())
    if all(name in os.environ for name in _LAUNCHED):
        with _launched(config), _signals(StopRequest(), say=False) as request:
            return train_here(_on_these_ranks(config, dist.get_world_size()), request)
    config = replace(config, progress=_shown(config))
    if config.backend == "nccl":
        _need_gpus(config.world_size)
    if config.world_size == 1:
        with _signals(StopRequest()) as request, torch.random.fork_rng(devices=[]):
            return train_here(config, request)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        with _signals(StopRequest(Path(folder) / "stop")) as request:
            return _on_new_ranks(config, request)


def train_here(config: TrainConfig, request: StopRequest, *, rank: int | None = None) -> TrainResult:
    """The run on this rank, or in this process where there are no ranks."""
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    return Loop(config, make_strategy(config, rank), rank=rank, request=request).run()


def make_strategy(config: TrainConfig, rank: int = 0) -> Strategy:
    """Data, network, optimizer, and how the ranks share a step."""
    device = torch.device("cpu")
    if config.backend == "nccl":
        _need_gpus(int(os.environ.get("LOCAL_RANK", rank)) + 1)
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    workload, maker = make_workload(config), optimizer_maker(config)
    computing = Computing(config.precision, config.accumulate)
    if config.pp > 1:
        return PipelineParallel(
            workload,
            maker,
            device,
            computing=computing,
            schedule=config.pp_schedule,
            micro_batches=config.micro_batches,
            checkpoint=policy_of(config.checkpoint),
        )
    checkpoint_blocks(workload.model, policy_of(config.checkpoint))
    if config.tp > 1:
        return TensorParallel(workload, maker, device, computing=computing)
    if config.world_size == 1:
        return Strategy(workload, maker, device, computing=computing)
    if config.zero:
        kind = ShardedModel if config.zero == 3 else ShardedOptimizer
        return kind(workload, maker, device, stage=config.zero, computing=computing)
    return DataParallel(workload, maker, device, computing=computing)


def _on_new_ranks(config: TrainConfig, request: StopRequest) -> TrainResult:
    threads = max(1, (os.cpu_count() or 1) // config.world_size)
    try:
        with Ranks(config.world_size, backend=config.backend, timeout=config.timeout, threads=threads) as ranks:
            return _run_aside(ranks, config, request)[0]
    except RankError as error:
        if isinstance(error.exception, ConfigError | DataError | SnapshotError):
            raise error.exception from None
        raise


def _run_aside(ranks: Ranks, config: TrainConfig, request: StopRequest) -> list[TrainResult]:
    """`ranks.run` in a thread: there it leaves Ctrl-C to us, for whom it is the wish to end the run in good order."""
    with ThreadPoolExecutor(1) as aside:
        future = aside.submit(copy_context().run, ranks.run, _on_rank, config, request.file)
        try:
            while not future.done():
                wait([future], timeout=0.5)  # in turns, since on Windows a long wait hears of no signal
        except BaseException:
            ranks.close()  # the second signal
            raise
        return future.result()


def _on_rank(config: TrainConfig, file: Path) -> TrainResult:
    return train_here(config, StopRequest(file))


def _on_these_ranks(config: TrainConfig, world_size: int) -> TrainConfig:
    """dp is what remains of the ranks; where it is given, it must fit."""
    others = config.pp * config.tp
    if world_size % others or config.dp not in (1, world_size // others):
        raise ConfigError(
            f"dp={config.dp} x pp={config.pp} x tp={config.tp} makes {config.world_size} ranks, but {world_size} were "
            f"started: start {config.world_size}, or leave dp out"
        )
    return replace(config, dp=world_size // others, progress=_shown(config))


def _need_gpus(count: int) -> None:
    if (found := torch.cuda.device_count()) < count:
        raise ConfigError(f"backend=nccl needs a GPU for every rank, {count}, and there are {found}: give backend=gloo")


def _shown(config: TrainConfig) -> str:
    if config.progress != "auto":
        return config.progress
    return "bar" if is_live() else "lines"


@contextlib.contextmanager
def _launched(config: TrainConfig) -> Iterator[None]:
    """Join the group of a job that torchrun, or a launcher like it, has started."""
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: its name need not be known
    if config.backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(config.backend, timeout=timedelta(seconds=config.timeout))
    set_rank(dist.get_rank())
    configure(network=None, rank=dist.get_rank())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _signals(request: StopRequest, *, say: bool = True) -> Iterator[StopRequest]:
    with listening(request, signal.SIGINT, signal.SIGTERM, say=say):
        yield request
