"""A rank's messages within a pipeline step: receives posted ahead, sends that nobody waits for until the end.

Every rank knows the others' lists, so it posts its receives in the order in which they are sent, some ahead of those
that it needs; a message then never waits for its receiver. No send blocks, so no order of actions can deadlock that the
check of the schedule lets pass.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from labkit.collectives.agreement import BARRIER_TAG
from labkit.collectives.groups import Endpoint
from labkit.collectives.messages import Receiving, Sending
from labkit.collectives.settings import settings
from labkit.parallel.pipeline.action_lists import Schedule
from labkit.parallel.pipeline.actions import Action
from labkit.parallel.pipeline.buffers import Buffers
from labkit.parallel.pipeline.shapes import Shape
from labkit.record import span

TAG, CONTROL_TAG = BARRIER_TAG + 1, BARRIER_TAG + 2
_LARGE = 1 << 18  # bytes from which on a message is begun in a thread
AHEAD = 4  # receives posted from each neighbour before they are needed, each with its buffer


def incoming(schedule: Schedule, rank: int) -> dict[int, list[Action]]:
    """For each other rank the actions whose results it sends to `rank`, in the order in which it sends them."""
    owners = schedule.owners
    found: dict[int, list[Action]] = {}
    for other, row in enumerate(schedule.rows):
        sent = [action for action in row if other != rank and receiver(action, owners) == rank]
        if sent:
            found[other] = sent
    return found


def receiver(action: Action, owners: dict[int, int]) -> int | None:
    """The rank that needs what `action` makes; None for weights, and at the ends of the pipeline."""
    if action.kind == "W":
        return None
    return owners.get(action.stage + (1 if action.kind == "F" else -1))


class Begun:
    """A message that is on its way."""

    has_begun = True

    def __init__(self, sending: Sending) -> None:
        self.sending = sending

    @property
    def has_left(self) -> bool:
        """Whether `wait` would return at once."""
        return self.sending.is_completed() and self.sending.left <= time.perf_counter()

    def wait(self) -> None:
        self.sending.wait()


class InBackground:
    """A large message that a thread begins to send: the backend copies it into the socket before it returns, and this
    rank has something better to do."""

    def __init__(self, thread: ThreadPoolExecutor, begin: Callable[[], Sending]) -> None:
        self.future = thread.submit(begin)

    @property
    def has_begun(self) -> bool:
        return self.future.done()

    @property
    def has_left(self) -> bool:
        """Whether `wait` would return at once."""
        return self.future.done() and Begun(self.future.result()).has_left

    def wait(self) -> None:
        self.future.result().wait()


@dataclass
class _Source:
    """What another rank sends, and how much of it is posted."""

    expected: Sequence[Action]
    posted: int = 0
    under_way: dict[Action, list[tuple[Receiving, Tensor]]] = field(default_factory=dict)
    positions: dict[Action, int] = field(init=False)

    def __post_init__(self) -> None:
        self.positions = {action: number for number, action in enumerate(self.expected)}


class Links:
    """The messages of one step on this rank.

    `shapes(action)` gives what `action`'s result consists of, or None as long as that is not known; `ask(action)` finds
    it out, and may wait.
    """

    def __init__(
        self,
        end: Endpoint,
        expected: dict[int, list[Action]],
        buffers: Buffers,
        thread: ThreadPoolExecutor,
        shapes: Callable[[Action], tuple[Shape, ...] | None],
        ask: Callable[[Action], tuple[Shape, ...]],
    ) -> None:
        self.end, self.buffers, self.thread, self.shapes, self.ask = end, buffers, thread, shapes, ask
        self.sources = {place: _Source(actions) for place, actions in expected.items()}
        self.sends: deque[Begun | InBackground] = deque()
        self.handed_over: InBackground | None = None
        self.places = {action: place for place, actions in expected.items() for action in actions}

    def post_ahead(self) -> None:
        """Post the first receives from each neighbour, as far as their shapes are known."""
        for source in self.sources.values():
            self._post(source, AHEAD)

    def send(self, tensors: Sequence[Tensor], place: int) -> None:
        """Start sending; the tensors must not change until the step has ended."""
        for tensor in tensors:
            payload = tensor.detach().contiguous()
            waiting = self.handed_over is not None and not self.handed_over.has_begun  # it must go first
            if waiting or payload.numel() * payload.element_size() >= _LARGE:
                self.handed_over = InBackground(self.thread, partial(self._begin, payload, place))
                self.sends.append(self.handed_over)
            else:
                self.sends.append(Begun(self._begin(payload, place)))
        self._let_go()

    def _begin(self, payload: Tensor, place: int) -> Sending:
        return Sending(self.end, payload, place, TAG, headed=settings.check)

    def take(self, action: Action) -> list[Tensor]:
        """The result of another rank's `action`, waited for."""
        place = self.places[action]
        source = self.sources[place]
        wanted = source.positions[action]
        while source.posted <= wanted:
            self._post(source, source.posted + 1, may_ask=True)
        receivings = source.under_way.pop(action)
        with span(f"wait for {action}", "wait"):
            for receiving, _ in receivings:
                receiving.wait()
        self._post(source, wanted + 1 + AHEAD)
        return [tensor for _, tensor in receivings]

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        while self.sends:
            self.sends.popleft().wait()

    def _post(self, source: _Source, until: int, *, may_ask: bool = False) -> None:
        while source.posted < min(until, len(source.expected)):
            action = source.expected[source.posted]
            shapes = self.shapes(action)
            if shapes is None:
                if not may_ask:
                    return
                shapes = self.ask(action)
            source.posted += 1
            source.under_way[action] = [self._receive(one, self.places[action]) for one in shapes]

    def _receive(self, one: Shape, place: int) -> tuple[Receiving, Tensor]:
        tensor = self.buffers.empty(one.shape, one.dtype)
        return Receiving(self.end, tensor, place, TAG, headed=settings.check), tensor

    def _let_go(self) -> None:
        """Free what has left already."""
        while self.sends and self.sends[0].has_left:
            self.sends.popleft().wait()
