"""`Action`: what a rank does at one moment of a pipeline step; schedules are lists of these.

The letters are PyTorch's: F forward, B the whole backward, I backward for the stage's inputs, W backward for its
weights. I and W are what B does at once: I is what the stage before waits for, W may come later (P. Qi and others, Zero
Bubble Pipeline Parallelism, arXiv:2401.10241, section 2).
"""

import re
from typing import Any, NamedTuple

KINDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
_TEXT = re.compile(r"(\d*)([FBIW])(\d+)")


class Action(NamedTuple):
    """One of the four kinds, for one micro-batch, on one stage."""

    kind: str
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        """As in "2F0": stage 2, forward, micro-batch 0."""
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def words(self) -> str:
        """As in "forward of micro-batch 0 on stage 2"."""
        return f"{KINDS[self.kind]} of micro-batch {self.micro_batch} on stage {self.stage}"

    @staticmethod
    def read(text: Any, stage: int) -> "Action":
        """From "F0", which means the given stage, or "2F0", which names its own, or from a kind and two whole numbers.
        Anything else is a ValueError."""
        if isinstance(text, tuple) and len(text) == 3 and all(type(one) is int for one in text[1:]):
            return Action(*text)
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError(
                f"{text!r} is no action: write F, B, I or W and a micro-batch, as F0, with the stage before it where a "
                "rank has several, as 2F0"
            )
        return Action(found[2], int(found[3]), int(found[1] or stage))
