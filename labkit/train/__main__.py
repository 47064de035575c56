"""`python -m labkit.train`, which torchrun starts on every rank."""

import sys

from labkit.train.commands import train_command

sys.exit(train_command(sys.argv[1:]))
