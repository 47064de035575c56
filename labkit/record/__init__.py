"""The one recorder of events, bytes, messages and memory that every figure, check and benchmark reads."""

from labkit.record.clock import measure_offset as measure_offset
from labkit.record.entries import KINDS as KINDS
from labkit.record.entries import MemorySample as MemorySample
from labkit.record.entries import Span as Span
from labkit.record.entries import Transfer as Transfer
from labkit.record.export import chrome_trace as chrome_trace
from labkit.record.export import from_json as from_json
from labkit.record.export import load as load
from labkit.record.export import save as save
from labkit.record.export import save_chrome_trace as save_chrome_trace
from labkit.record.export import to_json as to_json
from labkit.record.loopback import loopback_bytes as loopback_bytes
from labkit.record.record import RankRecord as RankRecord
from labkit.record.record import Record as Record
from labkit.record.recorder import Recorder as Recorder
from labkit.record.recorder import add_memory as add_memory
from labkit.record.recorder import add_span as add_span
from labkit.record.recorder import add_transfer as add_transfer
from labkit.record.recorder import recorders as recorders
from labkit.record.recorder import recording as recording
from labkit.record.recorder import set_rank as set_rank
from labkit.record.recorder import span as span
