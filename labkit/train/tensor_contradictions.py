"""What can't go together with tensor parallelism, each in a sentence."""

from typing import TYPE_CHECKING

from labkit.train.settings import ConfigError

if TYPE_CHECKING:
    from labkit.train.config import TrainConfig


def refuse_with_slices(config: "TrainConfig") -> None:
    """Raise ConfigError for the first setting that does not go with tp."""
    if config.zero:
        raise ConfigError(f"zero={config.zero} and tp={config.tp} together are not available yet: give one of them")
    if config.workload == "image" and config.norm == "sync":
        raise ConfigError(
            f"norm=sync normalises over all ranks, which with tp={config.tp} have other channels of the same samples: "
            "give norm=batch or norm=group"
        )
    if config.workload != "image" and config.num_heads % config.tp:
        raise ConfigError(
            f"num_heads={config.num_heads} can't be shared out evenly among tp={config.tp} ranks: change one of them"
        )
