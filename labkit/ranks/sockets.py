"""Freeing the other ranks when one fails: it shuts its connections, and whoever waits for it fails at once.

Destroying the group does not do it while a wrapper, a mesh or a pending receive still refers to it; and a rank that
is blocked inside gloo can't be asked to stop. Listening sockets are left alone: shutting one ends the process.
"""

import os
import socket

import psutil

_LOOPBACK = ("127.", "::1", "::ffff:127.")


def shut_connections() -> int:
    """Shut every connected loopback TCP socket of this process, gloo's among them; returns how many."""
    count = 0
    for connection in psutil.Process().net_connections(kind="tcp"):
        if not connection.raddr or connection.fd < 0 or not connection.raddr.ip.startswith(_LOOPBACK):
            continue
        try:
            with socket.socket(fileno=os.dup(connection.fd)) as copy:
                copy.shutdown(socket.SHUT_RDWR)
            count += 1
        except OSError:
            pass  # closed meanwhile
    return count
