"""Emulating a network on one machine: when a message may leave, when it arrives, and the waiting for it.

The sender computes both times and sends the arrival along in the header, on the clock that the processes of one
machine share (`time.perf_counter`). The receiver delivers at the later of the real and the modelled arrival.
"""

import threading
import time
from collections.abc import Callable

from labkit.collectives.network import Network


class Emulator:
    """One rank's network interface: keeps when its egress is free, separately inside and between nodes."""

    def __init__(
        self,
        network: Network,
        rank: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.network, self.rank = network, rank
        self._clock, self._sleep = clock, sleep
        self._free: dict[bool, float] = {}
        self._lock = threading.Lock()

    def depart(self, destination: int, nbytes: int) -> tuple[float, float]:
        """Queue `nbytes` for `destination`: the times at which the last byte leaves, and at which it arrives."""
        link = self.network.link(self.rank, destination)
        inside = link is self.network
        with self._lock:
            begin = max(self._clock(), self._free.get(inside, 0.0))
            left = begin + nbytes * link.seconds_per_byte
            self._free[inside] = left
        return left, left + link.latency

    def wait_until(self, moment: float) -> None:
        """Return at `moment` on the shared clock, at once if it is past."""
        while (rest := moment - self._clock()) > 0:
            self._sleep(rest)
