"""Running a learner's function where it can do no harm: on ranks of its own, in bounded time, with bounded output.

Whatever it does, hang, die, raise or return nonsense, becomes a `Trouble` in words; nothing is raised.
"""

import contextlib
import io
import linecache
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.learn.exercises import Exercise, Trial
from labkit.learn.nonsense import Nonsense
from labkit.learn.observations import Outcome
from labkit.words import _

MOST_ERRORS = 3  # trials that may raise until the rest is left out
PRINTED = 4_000  # characters of a learner's prints that a check shows
PRINTED_LINES = 60
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+)')


@dataclass(frozen=True)
class Trouble:
    """Why a trial has no outcome. `kind` is "hang", "death", "error", "nonsense", "unsendable" or "start"."""

    kind: str
    trial: Trial
    measured: str
    cause: str = ""
    details: str = ""
    wanted: str = ""


@dataclass
class Survey:
    """All that was seen of an answer."""

    outcomes: list[Outcome] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    untouched: bool = False


def survey(exercise: Exercise, function: Callable[..., Any], *, seconds: float) -> Survey:
    """Try `function` in every trial of the exercise, all together at most `seconds` of running time."""
    seen = Survey()
    groups: dict[int, list[Trial]] = {}
    for trial in exercise.trials:
        groups.setdefault(trial.world_size, []).append(trial)
    left = seconds
    with tempfile.TemporaryDirectory(prefix="labkit-check-") as folder, _limited_prints() as prints:
        for world_size, trials in groups.items():
            left = _on_ranks(world_size, trials, function, seen, left, seconds, folder, prints)
            if seen.untouched or _given_up(seen):
                break
    return seen


def _on_ranks(
    world_size: int,
    trials: list[Trial],
    function: Callable[..., Any],
    seen: Survey,
    left: float,
    limit: float,
    folder: str,
    prints: "_Limited",
) -> float:
    from labkit.learn.attempts import attempt
    from labkit.ranks import RankError, Ranks

    trial = trials[0]
    # ranks that wait for each other are told apart from one that is busy, while the clock still runs
    with Ranks(world_size, timeout=max(1.0, limit / 2)) as ranks:
        try:
            ranks.start()
            for trial in trials:
                begun = time.perf_counter()
                prints.heading = trial.label
                try:
                    observed = ranks.run(attempt, function, trial, max(left, 0.1), folder)
                    seen.outcomes.append(Outcome(trial, tuple(observed)))
                except RankError as error:
                    if error.type == "NotTriedYet":
                        seen.untouched = True
                        break
                    seen.troubles.append(_trouble(error, trial, limit, Path(folder)))
                    if _given_up(seen):
                        break
                left -= time.perf_counter() - begun
        except RankError as error:
            seen.troubles.append(Trouble("start", trial, str(error), _("this is not the fault of your function")))
        except (TypeError, AttributeError) as error:
            cause = _("it uses something of the notebook that can't travel, such as an open file, a lock or a thread")
            seen.troubles.append(Trouble("unsendable", trial, str(error), cause))
    return left


def _given_up(seen: Survey) -> bool:
    kinds = [trouble.kind for trouble in seen.troubles]
    return len(kinds) >= MOST_ERRORS or any(kind not in ("error", "nonsense") for kind in kinds)


def _trouble(error: Any, trial: Trial, limit: float, folder: Path) -> Trouble:
    """What a RankError means for the learner."""
    from labkit.ranks.errors import LOST

    text = str(error).removesuffix(f"; {LOST}")
    if error.type == "Nonsense":
        assert isinstance(error.exception, Nonsense)
        return Trouble("nonsense", trial, error.exception.returned, wanted=error.exception.wanted)
    if error.kind == "death":
        for stacks in sorted(folder.glob("stacks-*")):
            written = stacks.read_text(errors="replace")
            if "Timeout" in written:
                busy = _("rank {rank} was still busy after {limit:g} s").format(
                    rank=stacks.name.removeprefix("stacks-"), limit=limit
                )
                return Trouble("hang", trial, busy + _place(written), _("a loop that never ends, or far too slow"))
        return Trouble("death", trial, text, _("something in the function ended the whole process"))
    if error.kind in ("timeout", "busy"):
        cause = _("a rank waits for what nobody sends: all ranks must make the same calls in the same order")
        return Trouble("hang", trial, text, cause, _learners_part(error.details))
    return Trouble("error", trial, text, _likely(error.type), _learners_part(error.details))


def _learners_part(details: str) -> str:
    """Tracebacks without the frames of labkit and of libraries, which say nothing to a learner."""
    from labkit.ranks.whereabouts import is_users

    kept, shown = [], True
    for line in details.splitlines():
        frame = _FRAME.match(line.strip())
        if frame:
            shown = is_users(frame["file"])
        elif not line.startswith("    "):
            shown = True
        if shown:
            kept.append(line)
    return "\n".join(kept)


def _place(stacks: str) -> str:
    """The learner's innermost line in stacks that faulthandler wrote."""
    from labkit.ranks.whereabouts import is_users, place_of

    for frame in _FRAME.finditer(stacks):
        name, line = frame["file"], int(frame["line"])
        if is_users(name):
            return f" ({place_of(name, line)}: {linecache.getline(name, line).strip()})"
    return ""


def _likely(kind: str) -> str:
    return {
        "ZeroDivisionError": _("an edge case: something is zero in this trial"),
        "IndexError": _("an edge case: something is shorter in this trial than the function expects"),
        "RecursionError": _("the function calls itself without end"),
        "NameError": _("a name that is defined in no cell that ran, or a spelling mistake"),
        "ModuleNotFoundError": _("a module that is not installed"),
        "SystemExit": _("exit() ends the process: return a value instead"),
        "NotImplementedError": _("a case that the function leaves out"),
    }.get(kind, "")


class _Limited(io.TextIOBase):
    """Passes on so many characters and lines, each trial's under its heading, and swallows the rest."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.characters, self.lines = stream, PRINTED, PRINTED_LINES
        self.heading = ""

    def write(self, text: str) -> int:
        if self.heading and text.strip() and self.characters > 0:
            self.stream.write(f"{self.heading}:\n")
            self.heading = ""
        for line in text.splitlines(keepends=True):
            if self.characters <= 0:
                break
            self.stream.write(line[: self.characters])
            self.characters -= len(line)
            self.lines -= line.endswith("\n")
            if self.characters <= 0 or self.lines <= 0:
                self.characters = 0
                self.stream.write("\n[" + _("more was printed, which is left out here") + "]\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


@contextlib.contextmanager
def _limited_prints() -> Iterator[_Limited]:
    limited = _Limited(sys.stdout)
    with contextlib.redirect_stdout(limited):
        yield limited
