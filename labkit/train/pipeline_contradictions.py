"""What can't go together with pipeline stages, each in a sentence."""

from typing import TYPE_CHECKING

from labkit.train.settings import ConfigError

if TYPE_CHECKING:
    from labkit.train.config import TrainConfig


def refuse_with_stages(config: "TrainConfig") -> None:
    """Raise ConfigError for the first setting that does not go with pp."""
    if config.accumulate > 1:
        raise ConfigError(
            f"accumulate={config.accumulate} with pp={config.pp}: the pipeline cuts the batch by itself, give "
            "micro_batches instead"
        )
    if config.backend == "nccl":
        raise ConfigError(f"backend=nccl with pp={config.pp} is not available yet: give backend=gloo")
    if config.precision == "float16":
        raise ConfigError(f"precision=float16 with pp={config.pp} is not available: give bfloat16, or float32")
    if config.workload == "image" and config.norm == "sync":
        raise ConfigError(
            f"norm=sync normalises over all ranks, which with pp={config.pp} compute other layers: give norm=batch or "
            "norm=group"
        )
    if config.micro_batches > config.batch_size:
        raise ConfigError(
            f"micro_batches={config.micro_batches} is more than batch_size={config.batch_size}: give a sample for each"
        )
