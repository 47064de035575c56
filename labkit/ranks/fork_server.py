"""What the fork server does besides forking: when the process that uses it is gone, it ends the ranks.

Imported by nobody but the fork server, which preloads it. A rank ends itself when its connection closes; but one that
holds Python's lock hears of nothing, so its parent sees to it too.
"""

import atexit
import contextlib
import os
from multiprocessing import forkserver
from typing import Any

import psutil

from labkit.ranks import stores
from labkit.ranks.ending import end_tree

PATIENCE = 1.0  # seconds that ranks have to end by themselves
_me, _owner = os.getpid(), os.getppid()


@atexit.register
def _end_ranks() -> None:
    if os.getpid() != _me:
        return  # a rank, which has inherited this
    _, left = psutil.wait_procs(psutil.Process().children(), timeout=PATIENCE)
    for process in left:
        end_tree(process.pid)
    psutil.wait_procs(left, timeout=PATIENCE)
    stores.remove_all_of(_owner)
    # where it listened; a caller that was killed could not remove it
    server: Any = forkserver._forkserver
    with contextlib.suppress(OSError, TypeError):
        os.unlink(server._forkserver_address)
        os.rmdir(os.path.dirname(server._forkserver_address))
