"""Showing progress on rank 0: a bar where somebody watches, else a line now and then."""

import sys
import time
from typing import Any

from tqdm import tqdm

from labkit.train.results import Evaluation

LINES = 10  # a run prints about so many lines


class Progress:
    """Shows step, loss, accuracy and samples/s, as `how` says: "bar", "lines" or "none"."""

    def __init__(self, how: str, total: int, step: int) -> None:
        self.total, self.how = total, how
        self.every = max(1, total // LINES)
        self.since, self.samples = time.perf_counter(), 0
        self.bar: Any = None
        if how == "bar":
            self.bar = tqdm(total=total, initial=step, unit="step", file=sys.stdout, dynamic_ncols=True, leave=True)

    def step(self, step: int, samples: int, loss: float, accuracy: float) -> None:
        """One step is done."""
        self.samples += samples
        if self.bar is not None:
            # the bar redraws itself at most ten times a second
            self.bar.set_postfix_str(f"loss {loss:.4f}, accuracy {accuracy:.1%}, {self.speed:.0f} samples/s", False)
            self.bar.update()
        elif self.how == "lines" and (step % self.every == 0 or step == self.total):
            words = f"loss {loss:.4f}, accuracy {accuracy:.1%}, {self.speed:.0f} samples/s"
            print(f"step {step}/{self.total}: {words}", flush=True)
            self.restart()

    def evaluated(self, one: Evaluation) -> None:
        """An evaluation is done."""
        self.say(f"step {one.step}/{self.total}: test loss {one.loss:.4f}, test accuracy {one.accuracy:.2%}")
        self.restart()

    def say(self, words: str) -> None:
        """A line of its own."""
        if self.bar is not None:
            self.bar.write(words, file=sys.stdout)
        elif self.how == "lines":
            print(words, flush=True)

    @property
    def speed(self) -> float:
        """Samples a second since the last restart."""
        return self.samples / max(time.perf_counter() - self.since, 1e-9)

    def restart(self) -> None:
        """Measure the speed from now on."""
        self.since, self.samples = time.perf_counter(), 0

    def close(self) -> None:
        """End the bar's line."""
        if self.bar is not None:
            self.bar.close()
