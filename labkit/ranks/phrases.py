"""Ranks in words."""

from collections.abc import Iterable, Mapping


def those(ranks: Iterable[int], world_size: int) -> str:
    """Which ranks: "rank 1", "ranks 0 and 2", "ranks 1-3", "all ranks"."""
    chosen = sorted(ranks)
    if len(chosen) == 1:
        return f"rank {chosen[0]}"
    if len(chosen) == world_size:
        return "all ranks"
    *most, last = _runs(chosen)
    return "ranks " + (f"{', '.join(most)} and {last}" if most else last)


def _runs(ranks: list[int]) -> list[str]:
    """Three and more in a row as "1-3", the others alone."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [word for run in runs for word in (map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"])]


def told(doings: Mapping[int, tuple[str, str]], world_size: int) -> str:
    """What each rank does, given in the singular and in the plural: "rank 0 waits in barrier; ranks 1-3 finished"."""
    together: dict[tuple[str, str], list[int]] = {}
    for rank, doing in sorted(doings.items()):
        together.setdefault(doing, []).append(rank)
    return "; ".join(f"{those(ranks, world_size)} {doing[len(ranks) > 1]}" for doing, ranks in together.items())


FINISHED = ("finished", "finished")
ABSENT = ("takes no part", "take no part")
SILENT = ("is inside code that holds Python's lock", "are inside code that holds Python's lock")
