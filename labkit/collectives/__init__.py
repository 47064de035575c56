"""Send and receive, and all that is made of them; the emulated network."""

from torch.distributed import ReduceOp as ReduceOp

from labkit.collectives.all_reduction import all_reduce as all_reduce
from labkit.collectives.naive import barrier as barrier
from labkit.collectives.naive import broadcast as broadcast
from labkit.collectives.network import Network as Network
from labkit.collectives.point_to_point import Work as Work
from labkit.collectives.point_to_point import irecv as irecv
from labkit.collectives.point_to_point import isend as isend
from labkit.collectives.point_to_point import recv as recv
from labkit.collectives.point_to_point import send as send
