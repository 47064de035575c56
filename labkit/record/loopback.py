"""The kernel's own count of bytes on the loopback interface: a referee that knows nothing of our recorder.

Source: /proc/net/dev, proc(5) of the Linux manual: received bytes are the first number after an interface's name. It
counts headers of the protocols below, too, and whatever else talks on this machine meanwhile: compare large transfers.
"""

import sys
from pathlib import Path

_COUNTERS = Path("/proc/net/dev")


def loopback_bytes() -> int:
    """Bytes that have passed the loopback interface `lo` since the machine started; take the difference of two calls.

    What is sent is received, and counted once. Raises RuntimeError where the system has no such counters.
    """
    if sys.platform != "linux":
        raise RuntimeError(
            f"loopback_bytes: {sys.platform} has no loopback counters in /proc; this works on Linux only"
        )
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError as error:
        raise RuntimeError(f"loopback_bytes: {_COUNTERS} can't be read ({error.strerror})") from None
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError(f"loopback_bytes: {_COUNTERS} lists no interface lo; PyTorch then talks over another one")
