"""Settings that can't go together, and those that are not available yet."""

from typing import TYPE_CHECKING

from labkit.train.pipeline_contradictions import refuse_with_stages
from labkit.train.settings import ConfigError
from labkit.train.tensor_contradictions import refuse_with_slices

if TYPE_CHECKING:
    from labkit.train.config import TrainConfig

#: settings that only these workloads have
BELONGS = {
    "depth": ("image",),
    "stem": ("image",),
    "norm": ("image",),
    "augment": ("image",),
    "image_size": ("image",),
    "d_model": ("text", "tokens"),
    "num_layers": ("text", "tokens"),
    "num_heads": ("text", "tokens"),
    "d_ff": ("text", "tokens"),
    "max_len": ("text", "tokens"),
    "dropout": ("text", "tokens"),
}

#: the policies that go by a name; a number is every so many blocks
CHECKPOINTS = ("none", "sqrt", "selective")


def policy_of(checkpoint: str) -> str | int:
    """The policy that a setting such as "sqrt" or "2" stands for."""
    return int(checkpoint) if checkpoint.isdecimal() else checkpoint


def refuse_contradictions(config: "TrainConfig") -> None:
    """Raise ConfigError for the first contradiction."""
    _refuse_unavailable(config)
    defaults = {name: one.default for name, one in config.__dataclass_fields__.items()}
    for name, workloads in BELONGS.items():
        if config.workload not in workloads and getattr(config, name) != defaults[name]:
            which = " and ".join(workloads)
            raise ConfigError(f"{name} belongs to the workload {which}, not to {config.workload}: leave it out")
    if config.workload != "image" and config.d_model % config.num_heads:
        raise ConfigError(
            f"d_model={config.d_model} can't be split into num_heads={config.num_heads} equal heads: change one of them"
        )
    if config.optimizer != "sgd" and config.momentum != defaults["momentum"]:
        raise ConfigError("momentum belongs to optimizer=sgd: leave it out, or give optimizer=sgd")
    if config.steps and config.epochs != defaults["epochs"]:
        raise ConfigError(f"steps={config.steps} and epochs={config.epochs} both say how long to train: give one")
    if config.steps and config.warmup > config.steps:
        raise ConfigError(f"warmup={config.warmup} is longer than the run, steps={config.steps}: shorten it")
    if config.batch_size < config.dp:
        raise ConfigError(
            f"batch_size={config.batch_size} is the global batch, too small for dp={config.dp} ranks: give a "
            "sample for each at least"
        )
    if config.accumulate > config.batch_size // config.dp:
        raise ConfigError(
            f"accumulate={config.accumulate} is more than the {config.batch_size // config.dp} samples of a rank's "
            f"share of batch_size={config.batch_size}: give a smaller number, or a larger batch"
        )
    policy = policy_of(config.checkpoint)
    if policy not in CHECKPOINTS and not (isinstance(policy, int) and policy > 0):
        raise ConfigError(
            f"checkpoint={config.checkpoint} must be one of {', '.join(CHECKPOINTS)}, or a number of blocks from 1"
        )
    for name in ("snapshot_every", "resume"):
        if getattr(config, name) and not config.folder:
            raise ConfigError(f"{name} needs a folder for the snapshots: give folder=PATH")
    if config.data_folder and not config.data:
        raise ConfigError("data_folder says where a known set lies unpacked: give its name too, as in data=ag-news")


def _refuse_unavailable(config: "TrainConfig") -> None:
    axes = {"dp": config.dp, "pp": config.pp, "tp": config.tp}
    several = [f"{name}={size}" for name, size in axes.items() if size > 1]
    if len(several) > 1:
        raise ConfigError(f"{' and '.join(several)} together are not available yet: give one of them")
    if config.pp > 1:
        refuse_with_stages(config)
    elif config.micro_batches or config.pp_schedule != "1f1b":
        raise ConfigError("micro_batches and pp_schedule belong to a pipeline: give pp too, or leave them out")
    if config.tp > 1:
        refuse_with_slices(config)
    if config.zero and config.pp > 1:
        raise ConfigError(f"zero={config.zero} and pp={config.pp} together are not available yet: give one of them")
