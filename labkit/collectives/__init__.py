"""Send and receive, and all that is made of them; the emulated network."""

from torch.distributed import ReduceOp as ReduceOp

from labkit.collectives.all_reduction import all_reduce as all_reduce
from labkit.collectives.exchanging import all_to_all_single as all_to_all_single
from labkit.collectives.messages import Work as Work
from labkit.collectives.network import Network as Network
from labkit.collectives.point_to_point import irecv as irecv
from labkit.collectives.point_to_point import isend as isend
from labkit.collectives.point_to_point import recv as recv
from labkit.collectives.point_to_point import send as send
from labkit.collectives.rooted import barrier as barrier
from labkit.collectives.rooted import broadcast as broadcast
from labkit.collectives.rooted import reduce as reduce
from labkit.collectives.scattering import all_gather_into_tensor as all_gather_into_tensor
from labkit.collectives.scattering import reduce_scatter_tensor as reduce_scatter_tensor
