"""Pictures from records: a figure never measures anything itself, it reads a record or values counted from one."""

from labkit.show.bar_rows import bars as bars
from labkit.show.bit_row import number_bits as number_bits
from labkit.show.bit_toggles import explore_bits as explore_bits
from labkit.show.chunk_grid import chunk_grid as chunk_grid
from labkit.show.footprint import memory_bars as memory_bars
from labkit.show.lines import curves as curves
from labkit.show.mountain import memory_over_time as memory_over_time
from labkit.show.picture import Picture as Picture
from labkit.show.pipeline_boxes import idle_share as idle_share
from labkit.show.pipeline_boxes import pipeline_grid as pipeline_grid
from labkit.show.rank_rows import lanes as lanes
from labkit.show.shard_matrix import shard_matrices as shard_matrices
from labkit.show.still_twin import explore as explore
from labkit.show.theme import color_of as color_of
