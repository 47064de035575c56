"""Axes and groups of ranks, which piece of each tensor a rank holds, and the sums that need to know."""

from labkit.mesh.attachment import FlatPart as FlatPart
from labkit.mesh.attachment import Gradient as Gradient
from labkit.mesh.attachment import gradient_of as gradient_of
from labkit.mesh.attachment import place as place
from labkit.mesh.attachment import placement_of as placement_of
from labkit.mesh.attachment import placements_of as placements_of
from labkit.mesh.axes import Axis as Axis
from labkit.mesh.axes import as_axis as as_axis
from labkit.mesh.clipping import clip_grad_norm_ as clip_grad_norm_
from labkit.mesh.counting import axes_to_sum as axes_to_sum
from labkit.mesh.counting import counts_here as counts_here
from labkit.mesh.counting import sum_over as sum_over
from labkit.mesh.device_mesh import init_device_mesh as init_device_mesh
from labkit.mesh.placement import Placement as Placement
from labkit.mesh.resharding import copy_overlap as copy_overlap
from labkit.mesh.resharding import partition_fault as partition_fault
