"""The numbers of a run as files: one JSON object a line, and the same for TensorBoard."""

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"
BOARD = "tensorboard"
FLUSH = 2.0  # seconds after which readers see what was written


class Metrics:
    """Writes `metrics.jsonl` and `tensorboard/` in the run's folder; without a folder, nothing. Rank 0 has one.

    What an earlier try of the run wrote of steps after `step`, from which it goes on, is removed.
    """

    def __init__(self, folder: Path | None, step: int) -> None:
        self.file: TextIO | None = None
        self.board: Any = None
        self.flushed = time.monotonic()
        if folder is None:
            return
        # slow to import, and not needed without a folder
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        _cut(folder / METRICS, step)
        self.file = (folder / METRICS).open("a", encoding="utf-8")
        self.board = SummaryWriter(str(folder / BOARD), purge_step=step + 1 if step else None)

    def write(self, kind: str, step: int, **values: float) -> None:
        """Add the numbers of `kind`, "train" or "test", after `step` steps."""
        if self.file is None:
            return
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        for name, value in values.items():
            self.board.add_scalar(f"{kind}/{name}", value, step)
        if time.monotonic() - self.flushed > FLUSH:
            self.flush()

    def flush(self) -> None:
        """Let readers see what was written so far."""
        if self.file is not None:
            self.file.flush()
            self.board.flush()
            self.flushed = time.monotonic()

    def close(self) -> None:
        """Write out the rest."""
        if self.file is not None:
            self.file.close()
            self.board.close()
            self.file = None


def _cut(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`; a last line that a crash has torn goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    new = path.with_suffix(".new")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, path)
