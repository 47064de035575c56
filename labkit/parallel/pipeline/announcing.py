"""At the start of a step the rank of the first stage, which alone knows the batch, tells the others what comes.

One small message to each, control traffic. Each compares it with what it was called for itself: ranks that do different
things are told so, and never wait for each other.
"""

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.collectives.calls import operation
from labkit.collectives.groups import Endpoint
from labkit.collectives.messages import Receiving, Sending

_FIELDS = 6


class Announcement(NamedTuple):
    """What must be the same on all ranks in a step."""

    rows: int  # of the batch
    signature: int  # of the inputs' shapes and dtypes
    lists: int  # of the schedule
    training: int  # 1 for step, 0 for eval
    weighed: int  # 1 where the weight of the batch is given
    cuts: int = 0  # where the model is cut; 0 for stages made by hand

    def check(self, other: "Announcement", mine: int, first: int) -> None:
        """Raise RuntimeError where the first stage's rank announces (`other`) something else than `self` holds."""
        told = {
            "training": "calls {} while rank {first} calls {}",
            "weighed": "gives {} and rank {first} {}",
            "lists": "has another schedule or number of micro-batches",
        }
        words = {"training": ("eval", "step"), "weighed": ("no weight", "a weight")}
        for name, sentence in told.items():
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                filled = [words[name][value] for value in (ours, theirs)] if name in words else []
                rest = "" if name in words else f" than rank {first}"
                raise RuntimeError(
                    f"pipeline: rank {mine} {sentence.format(*filled, first=first)}{rest}: all ranks of a pipeline "
                    "make the same call"
                )
        if self.cuts != other.cuts:
            raise RuntimeError(
                f"pipeline: rank {mine} has cut the model elsewhere than rank {first}, so that steps would be left out "
                "or run twice: give all ranks the same cuts, or a profile that is measured once"
            )


def digest(*what: Any) -> int:
    """A number that differs where `what` does, and is the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:7], "big")


def signature_of(values: Any) -> tuple[Any, ...]:
    """The shapes and dtypes in a nesting, rows left out."""
    if isinstance(values, Tensor):
        return (tuple(values.shape[1:]), str(values.dtype), values.requires_grad)
    parts = values.items() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ()
    return tuple(signature_of(part) for part in parts)


def announce(end: Endpoint, what: Announcement, tag: int) -> list[Sending]:
    """From the first stage's rank to all others of the group."""
    words = torch.tensor(what, dtype=torch.int64)
    with operation("announcement", end, control=True):
        return [Sending(end, words, place, tag, headed=False) for place in range(end.size) if place != end.place]


def hear(end: Endpoint, place: int, tag: int) -> Announcement:
    """What the rank at `place` announces."""
    words = torch.zeros(_FIELDS, dtype=torch.int64)
    with operation("announcement", end, control=True):
        Receiving(end, words, place, tag, headed=False).wait()
    return Announcement(*words.tolist())
