"""One clock for several processes: the offset between two clocks, from timed round trips.

Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989), section 3: the remote clock
was read somewhere inside the round trip, so the midpoint is off by at most half of it; the fastest trip bounds it best.
"""

import time
from collections.abc import Callable


def measure_offset(read_remote: Callable[[], float], *, trips: int = 5) -> tuple[float, float]:
    """The seconds to add to a remote clock's reading to have it on ours, and the bound of the error.

    `read_remote` asks the other process for its `time.perf_counter()` and waits for the answer.
    """
    best_offset, best_error = 0.0, float("inf")
    for _ in range(trips):
        asked = time.perf_counter()
        remote = read_remote()
        answered = time.perf_counter()
        error = (answered - asked) / 2
        if error < best_error:
            best_offset, best_error = (asked + answered) / 2 - remote, error
    return best_offset, best_error
