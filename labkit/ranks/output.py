"""What ranks write, printed during the call and labelled by rank.

Live (in JupyterLab, on a terminal) lines appear as they come. Elsewhere (papermill, nbval, pytest, a pipe) they are
grouped by rank when the call ends, so that two runs print the same. A line that is redrawn with carriage returns, as
tqdm's, collapses: to one updating line when live, to its last state when grouped.
"""

import os
import sys
from collections.abc import Sequence

MOST = 10_000_000  # bytes of one rank's output that one call shows


def is_live() -> bool:
    """Whether somebody watches: LABKIT_OUTPUT=live or grouped decides, else JupyterLab or a terminal."""
    chosen = os.environ.get("LABKIT_OUTPUT")
    if chosen in ("live", "grouped"):
        return chosen == "live"
    if "ipykernel" in sys.modules and "JPY_PARENT_PID" in os.environ:
        # JupyterLab names the session; papermill and nbval do not
        return "JPY_SESSION_NAME" in os.environ
    return sys.stdout is not None and sys.stdout.isatty()


def labelled(rank: int, lines: Sequence[str]) -> str:
    """The lines of a rank as they are printed."""
    return "\n".join(f"[rank {rank}] {line}" for line in lines)


class Output:
    """The output of the ranks during one call."""

    def __init__(self, world_size: int, *, live: bool) -> None:
        self.live = live
        self.partial = [b""] * world_size
        self.lines: list[list[str]] = [[] for _ in range(world_size)]
        self.taken = [0] * world_size
        self.dropped = [0] * world_size
        self.drawn = ""  # the line that is being redrawn

    def feed(self, rank: int, data: bytes) -> None:
        """Take what `rank` wrote. Live, whole lines are printed at once."""
        kept = data[: MOST - self.taken[rank]]
        self.taken[rank] += len(kept)
        self.dropped[rank] += len(data) - len(kept)
        *lines, self.partial[rank] = (self.partial[rank] + kept).split(b"\n")
        self.lines[rank] += [_settled(line) for line in lines]
        if self.live:
            self.show_lines(rank)
            if b"\r" in self.partial[rank]:
                # only its last state matters, and it may be long
                state = _settled(self.partial[rank])
                self.partial[rank] = b"\r" + state.encode()
                self.redraw(labelled(rank, [state]))

    def show_lines(self, rank: int) -> None:
        if self.lines[rank]:
            if self.drawn:
                self.redraw("")
            print(labelled(rank, self.lines[rank]), flush=True)
            self.lines[rank].clear()

    def redraw(self, text: str) -> None:
        """Put `text` in the place of the line that was drawn last, and stay in it."""
        if text == self.drawn:
            return
        blank = " " * len(self.drawn)
        print(f"\r{blank}\r{text}", end="", flush=True)
        self.drawn = text

    def finish(self) -> None:
        """Print what is left, a last line without a newline included."""
        for rank, rest in enumerate(self.partial):
            if rest:
                self.lines[rank].append(_settled(rest))
            if self.dropped[rank]:
                self.lines[rank].append(f"(and {self.dropped[rank] / 1e6:.1f} MB more, not shown)")
            self.partial[rank], self.dropped[rank] = b"", 0
            self.show_lines(rank)


def _settled(line: bytes) -> str:
    """What a terminal shows of a line in the end: the text after the last carriage return that has any."""
    parts = [part for part in line.split(b"\r") if part]
    return parts[-1].decode(errors="replace") if parts else ""
