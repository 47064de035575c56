"""Data parallel: every rank has the whole model and a share of each batch."""

from labkit.parallel.data_parallel.averaging import average_each as average_each
from labkit.parallel.data_parallel.averaging import average_flat as average_flat
from labkit.parallel.data_parallel.marking import is_wrapped as is_wrapped
from labkit.parallel.data_parallel.wrapper import DistributedDataParallel as DistributedDataParallel
