"""One training loop for every strategy, learning-rate schedules, snapshots and resume, the command."""

from labkit.train.config import TrainConfig as TrainConfig
from labkit.train.results import Evaluation as Evaluation
from labkit.train.results import TrainResult as TrainResult
from labkit.train.running import train as train
from labkit.train.settings import ConfigError as ConfigError
