"""`labkit bench ranks`: how long ranks take to start, to answer a call, and to end.

The first start of a process is measured in a process of its own, beside what `import torch` takes there.
"""

import statistics
import subprocess
import sys
import time

from labkit.ranks import Ranks

FIRST_START, LATER_START, WARM_CALL = 2.0, 0.2, 0.010  # seconds at most, for 2 ranks

_FIRST = """
import time
begin = time.perf_counter()
import torch, torch.distributed
imported = time.perf_counter()
from labkit.ranks import Ranks
with Ranks({size}) as ranks:
    ranks.start()
    print(imported - begin, time.perf_counter() - imported)
"""


def first_start(size: int) -> tuple[float, float]:
    """Seconds that torch's own import takes in a new process, and after it the first start of ranks, in which the fork
    server imports torch once more."""
    done = subprocess.run([sys.executable, "-c", _FIRST.format(size=size)], capture_output=True, text=True, check=True)
    imported, started = map(float, done.stdout.split())
    return imported, started


def _nothing() -> None:
    """What a warm call calls."""


def bench_ranks(*, repeats: int = 5) -> dict[str, float]:
    """Print a line for 2 and for 4 ranks; returns seconds by name."""
    seconds: dict[str, float] = {}
    for size in (2, 4):
        imported, first = first_start(size)
        starts, calls, ends = [], [], []
        for _ in range(repeats + 1):
            ranks = Ranks(size)
            begin = time.perf_counter()
            ranks.start()
            starts.append(time.perf_counter() - begin)
            for _ in range(20):
                begin = time.perf_counter()
                ranks.run(_nothing)
                calls.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            ranks.close()
            ends.append(time.perf_counter() - begin)
        later, warm, end = statistics.median(starts[1:]), statistics.median(calls[20:]), statistics.median(ends[1:])
        print(
            f"ranks {size}: first start {first:.2f} s, {first - imported:.2f} s over torch's own import (at most "
            f"{FIRST_START:g}), later starts {later:.3f} s (at most {LATER_START:g}), a warm call {1e3 * warm:.2f} ms "
            f"(at most {1e3 * WARM_CALL:g}), ending {end:.3f} s"
        )
        seconds |= {f"first {size}": first, f"later {size}": later, f"call {size}": warm, f"end {size}": end}
    return seconds
