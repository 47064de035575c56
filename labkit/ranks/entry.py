"""Where a rank's process begins: it cuts itself loose from the caller, and then serves until its end."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import numpy as np
import torch

from labkit.collectives.settings import configure
from labkit.ranks import channel, faults, stores
from labkit.ranks.ending import end_myself
from labkit.ranks.forking import let_go_of_server
from labkit.ranks.jobs import Job
from labkit.ranks.reports import report
from labkit.ranks.streams import Streams
from labkit.ranks.worker import Worker
from labkit.record import set_rank

_PR_SET_PDEATHSIG = 1  # prctl(2)
# another process than the rank itself where the fork server has preloaded this module
_IMPORTED_BY = os.getpid()


def main(job: Job, connection: Connection, output: Connection) -> None:
    """The life of a rank. `output` takes what it writes to stdout and stderr."""
    os.setsid()
    _die_with_parent()
    let_go_of_server()
    try:
        streams = Streams(output)
        os.environ.clear()
        os.environ.update(job.environment)
        sys.path[:] = job.path
        os.chdir(job.folder)
        torch.set_num_threads(job.threads)
        # forked ranks would all draw the same numbers
        np.random.seed()
        set_rank(job.rank)
        stores.make(job.stores)
        faults.watch(job.stores, job.rank)
        configure(network=job.network, rank=job.rank, check=job.check)
        serve(Worker(job, connection, streams, preloaded=os.getpid() != _IMPORTED_BY))
        streams.flush()
        atexit._run_exitfuncs()
    except BaseException as error:
        with contextlib.suppress(Exception):  # nobody listens any more
            channel.send(connection, report(job.rank, error, channel.pack))
    finally:
        end_myself()


def serve(worker: Worker) -> None:
    """Work until told to stop."""
    signal.signal(signal.SIGINT, worker.on_interrupt)
    threading.Thread(target=worker.listen, name="labkit-listen", daemon=True).start()
    worker.serve()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
