"""What ranks write, printed by the notebook's main thread during the call and labelled by rank.

Live (in JupyterLab, on a terminal) lines appear as they come. Elsewhere (papermill, nbval, pytest, a pipe) they are
grouped by rank when the call ends, so that two runs print the same. A line that is redrawn with carriage returns, as
tqdm's, collapses: to one updating line when live, to its last state when grouped.
"""

import os
import sys


def is_live() -> bool:
    """Whether somebody watches: LABKIT_OUTPUT=live or grouped decides, else JupyterLab or a terminal."""
    chosen = os.environ.get("LABKIT_OUTPUT")
    if chosen in ("live", "grouped"):
        return chosen == "live"
    if "ipykernel" in sys.modules and "JPY_PARENT_PID" in os.environ:
        # JupyterLab names the session; papermill and nbval do not
        return "JPY_SESSION_NAME" in os.environ
    return sys.stdout is not None and sys.stdout.isatty()


class Output:
    """The output of the ranks during one call."""

    def __init__(self, world_size: int, *, live: bool) -> None:
        self.live = live
        self.partial = [b""] * world_size
        self.lines: list[list[str]] = [[] for _ in range(world_size)]
        self.redrawing = False

    def feed(self, rank: int, data: bytes) -> None:
        """Take what `rank` wrote. Live, whole lines are printed at once."""
        *lines, self.partial[rank] = (self.partial[rank] + data).split(b"\n")
        self.lines[rank] += [_settled(line) for line in lines]
        if self.live:
            self.show_lines(rank)
            if b"\r" in self.partial[rank]:
                # only its last state matters, and it may be long
                state = _settled(self.partial[rank])
                self.partial[rank] = b"\r" + state.encode()
                print(f"\r[rank {rank}] {state}", end="", flush=True)
                self.redrawing = True

    def show_lines(self, rank: int) -> None:
        if not self.lines[rank]:
            return
        start = "\r" if self.redrawing else ""
        self.redrawing = False
        print(start + "\n".join(f"[rank {rank}] {line}" for line in self.lines[rank]), flush=True)
        self.lines[rank].clear()

    def finish(self) -> None:
        """Print what is left, a last line without a newline included."""
        for rank, rest in enumerate(self.partial):
            if rest:
                self.lines[rank].append(_settled(rest))
            self.partial[rank] = b""
            self.show_lines(rank)


def _settled(line: bytes) -> str:
    """What a terminal shows of a line in the end: the text after the last carriage return that has any."""
    parts = [part for part in line.split(b"\r") if part]
    return parts[-1].decode(errors="replace") if parts else ""
