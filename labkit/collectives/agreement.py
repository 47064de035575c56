"""Before a collective: do all ranks call the same one, with the same shape and dtype?

Each rank tells the next one in the group what it calls. Wherever two ranks differ, two neighbours differ, and the
error names both. One small message a rank, control traffic; left out where messages are not checked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from labkit.collectives.calls import operation
from labkit.collectives.groups import Endpoint
from labkit.collectives.headers import MAX_TAG
from labkit.collectives.messages import Receiving, Sending
from labkit.collectives.settings import settings

_LENGTH = 160  # bytes of the text that travels
AGREEMENT_TAG = MAX_TAG
COLLECTIVE_TAG = MAX_TAG + 1
BARRIER_TAG = MAX_TAG + 2


def describe(tensor: torch.Tensor) -> str:
    """A tensor in words: "float32 [3, 4]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@contextmanager
def collective(end: Endpoint, name: str, tensor: torch.Tensor, *how: str, **details: Any) -> Iterator[None]:
    """The frame of every collective: all ranks agree on its name, the tensor's shape and dtype, and `how`.

    What is sent inside counts under that name, as one span with `details`.
    """
    with operation(name, end, **details):
        if settings.check and end.size > 1:
            agree(end, f"{name}({', '.join([describe(tensor), *how])})")
        yield


def agree(end: Endpoint, call: str) -> None:
    """Raise RuntimeError where this rank's neighbour calls something else than `call`."""
    if end.size == 1 or end.nccl or not settings.check:
        return
    mine = torch.zeros(_LENGTH, dtype=torch.uint8)
    text = call.encode()[:_LENGTH]
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    theirs = torch.zeros_like(mine)
    after, before = (end.place + 1) % end.size, (end.place - 1) % end.size
    with operation("agreement", end, control=True):
        receiving = Receiving(end, theirs, before, AGREEMENT_TAG, headed=False)
        sending = Sending(end, mine, after, AGREEMENT_TAG, headed=False)
        receiving.wait()
        sending.wait()
    if not torch.equal(mine, theirs):
        other = bytes(theirs.tolist()).rstrip(b"\0").decode(errors="replace")
        raise RuntimeError(
            f"rank {end.members[before]} calls {other} but rank {end.members[end.place]} calls {call}: "
            "all ranks of a group must make the same call with the same shape and dtype"
        )
