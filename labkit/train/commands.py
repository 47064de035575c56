"""`labkit train name=value ...`, and the same as `torchrun ... -m labkit.train name=value ...`."""

import os
import sys
from collections.abc import Sequence

from labkit.data.errors import DataError
from labkit.ranks import RankError
from labkit.train.config import TrainConfig, help_text
from labkit.train.running import train
from labkit.train.settings import ConfigError
from labkit.train.snapshot_exchange import SnapshotError

_USAGE = """usage: labkit train [name=value ...]
       torchrun --standalone --nproc-per-node N -m labkit.train [name=value ...]

Train a workload. Without settings: a small ResNet on the embedded images, one epoch.
  labkit train workload=text dp=2 batch_size=128
  labkit train data=imagenette2-160 norm=group folder=runs/first snapshot_every=100

settings and their defaults:"""

_STOPPED = {"SIGINT": 130, "SIGTERM": 143}


def train_command(argv: Sequence[str]) -> int:
    """Run `labkit train`; returns the exit code: 0 done, 1 failed, 2 asked wrongly, 130 or 143 stopped by a signal.

    Under torchrun a stopped run returns 0, since torchrun takes anything else for a failure of its own.
    """
    if any(argument in ("-h", "--help", "help") for argument in argv):
        print(f"{_USAGE}\n{help_text()}")
        return 0
    first = os.environ.get("RANK", "0") == "0"
    try:
        result = train(TrainConfig.from_arguments(argv))
    except ConfigError as error:
        if first:  # every process of a torchrun job has the same to say
            print(f"labkit train: {error}", file=sys.stderr)
        return 2
    except (DataError, SnapshotError, RankError, ValueError) as error:
        print(f"labkit train: {error}", file=sys.stderr)
        return 1
    if first:
        print(result)
    return _STOPPED.get(result.stopped, 0) if "TORCHELASTIC_RUN_ID" not in os.environ else 0
