"""The emulated network: what a link would cost, in the alpha-beta model.

A message of n bytes takes `latency + n / bandwidth` seconds (R. Hockney, The communication challenge for MPP,
Parallel Computing 20 (1994), equation 1). Links are full duplex. What one rank sends leaves one message after the
other (egress is serialised); what it receives does not queue.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network to emulate: every link has this latency and bandwidth, or `inter`'s between nodes.

    Args:
        latency_us: microseconds from the last byte leaving to its arrival.
        bandwidth_gbit_s: gigabits (1e9 bits) per second that one rank can send.
        node_size: ranks in a node: ranks 0 to node_size - 1 form the first. None means one node.
        inter: the network between nodes; needs `node_size`.
    """

    latency_us: float
    bandwidth_gbit_s: float
    node_size: int | None = None
    inter: "Network | None" = None

    def __post_init__(self) -> None:
        if not _is_number(self.latency_us) or not 0 <= self.latency_us < math.inf:
            raise ValueError(f"Network: latency_us is {self.latency_us!r}; give microseconds, 0 or more")
        if not _is_number(self.bandwidth_gbit_s) or not self.bandwidth_gbit_s > 0:
            raise ValueError(f"Network: bandwidth_gbit_s is {self.bandwidth_gbit_s!r}; give Gbit/s above 0")
        if (self.node_size is None) != (self.inter is None):
            raise ValueError("Network: node_size and inter belong together: give both or neither")
        if self.node_size is not None and (not isinstance(self.node_size, int) or self.node_size < 1):
            raise ValueError(f"Network: node_size is {self.node_size!r}; give the number of ranks in a node, 1 or more")
        if self.inter is not None and not isinstance(self.inter, Network):
            raise ValueError(f"Network: inter is {self.inter!r}; give a Network")
        if self.inter is not None and self.inter.inter is not None:
            raise ValueError("Network: inter has an inter of its own; there are two levels, inside and between nodes")

    def link(self, source: int, destination: int) -> "Network":
        """The network that a message between these two ranks (global) passes: this one, or `inter`."""
        if self.inter is None or self.node_size is None:
            return self
        same_node = source // self.node_size == destination // self.node_size
        return self if same_node else self.inter

    @property
    def latency(self) -> float:
        """Latency in seconds: alpha."""
        return self.latency_us * 1e-6

    @property
    def seconds_per_byte(self) -> float:
        """Seconds a byte needs to leave: beta."""
        return 8 / (self.bandwidth_gbit_s * 1e9)

    def __str__(self) -> str:
        words = f"{self.latency_us:g} us, {self.bandwidth_gbit_s:g} Gbit/s"
        if self.inter is None:
            return words
        return f"{words} within nodes of {self.node_size}, {self.inter} between them"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
