"""Collectives in the background: one thread a group, which keeps the order in which they were called.

Two collectives of one group at a time would mix their messages. So a call that does not ask for the background waits
for those that are under way in its group.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta

from labkit.collectives.groups import Endpoint
from labkit.collectives.messages import Work

_threads: dict[Endpoint, ThreadPoolExecutor] = {}
_last: dict[Endpoint, "Future[None]"] = {}


class BackgroundWork:
    """A collective under way. `wait` raises what went wrong in it."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._future.result(None if timeout is None else timeout.total_seconds())
        except NotYet:
            raise RuntimeError(f"the collective was not finished within {timeout}: wait longer") from None
        return True

    def is_completed(self) -> bool:
        return self._future.done()


def perform(run: Callable[[], None], end: Endpoint, *, async_op: bool) -> Work | None:
    """Run a collective now, or in the background if `async_op`; then its work object is returned, else None."""
    if async_op:
        if end not in _threads:
            _threads[end] = ThreadPoolExecutor(1, thread_name_prefix=f"labkit-{end.name}")
        _last[end] = _threads[end].submit(run)
        return BackgroundWork(_last[end])
    if end in _last:
        _last.pop(end).exception()  # waits; its own work object raises it
    run()
    return None


def forget_threads() -> None:
    """Called when the groups are built anew: what was under way has failed."""
    for thread in _threads.values():
        thread.shutdown(wait=False, cancel_futures=True)
    _threads.clear()
    _last.clear()
