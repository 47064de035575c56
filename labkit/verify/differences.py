"""Comparing what the ranks have with the truth, name by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.verify.courses import Named

#: largest difference allowed, as rtol * |truth| + atol, by dtype: see `torch.testing.assert_close` for float32
TOLERANCES = {torch.float32: (1.3e-6, 1e-5), torch.float64: (0.0, 1e-9)}


@dataclass(frozen=True)
class Difference:
    """One parameter on one or several ranks against the truth.

    `error` is the largest difference, `excess` the largest as a multiple of what is allowed there: above 1 it is too
    much. `ratio` is ours / truth by least squares, None where the truth is zero. `note` says what numbers don't.
    """

    name: str
    ranks: tuple[int, ...]
    error: float
    excess: float
    ratio: float | None = None
    note: str = ""

    @property
    def bad(self) -> bool:
        return not self.excess <= 1


def compare(ranks: Sequence[Named | None], truth: Sequence[Named], rtol: float, atol: float) -> list[Difference]:
    """The differences of every name, each rank against its own truth. A rank may lack a name that another has; equal
    values on several ranks are one difference."""
    found: list[Difference] = []
    names = [*truth[0], *dict.fromkeys(name for one in ranks for name in one or () if name not in truth[0])]
    for name in names:
        holders: dict[tuple[int, int], list[int]] = {}
        for rank, one in enumerate(ranks):
            if one is not None and name in one:
                holders.setdefault((id(one[name]), id(truth[rank].get(name))), []).append(rank)
        for who in holders.values():
            mine = ranks[who[0]]
            assert mine is not None
            found.append(_difference(name, tuple(who), mine[name], truth[who[0]], rtol, atol))
        if not holders and any(one is not None for one in ranks):
            found.append(Difference(name, tuple(range(len(ranks))), float("inf"), float("inf"), note="missing"))
    return found


def _difference(
    name: str, who: tuple[int, ...], ours: Tensor | None, truth: Mapping[str, Tensor | None], rtol: float, atol: float
) -> Difference:
    wrong = float("inf")
    if name not in truth:
        return Difference(name, who, wrong, wrong, note="no such name in the module that build() gives")
    true = truth[name]
    if true is None:
        if ours is None or not ours.numel() or not ours.any():
            return Difference(name, who, 0.0, 0.0)
        return Difference(name, who, ours.abs().max().item(), wrong, note="should be None")
    if ours is None:
        size = true.abs().max().item() if true.numel() else 0.0
        excess = (true.abs() / (atol + rtol * true.abs())).max().item() if true.numel() else 0.0
        return Difference(name, who, size, excess, note="is None")
    if ours.shape != true.shape:
        return Difference(name, who, wrong, wrong, note=f"has shape {list(ours.shape)}, not {list(true.shape)}")
    if not true.numel():
        return Difference(name, who, 0.0, 0.0)
    a, b = ours.double(), true.double()
    distance = (a - b).abs()
    if distance.isnan().any():
        return Difference(name, who, wrong, wrong, note="is not a number")
    excess = (distance / (atol + rtol * b.abs())).max().item()
    square = (b * b).sum().item()
    ratio = (a * b).sum().item() / square if square > 0 else None
    return Difference(name, who, distance.max().item(), excess, ratio)


def table(differences: Sequence[Difference], world_size: int, *, most: int = 8) -> str:
    """The worst offenders, the worst first, as a table of text."""
    worst = sorted((one for one in differences if one.bad), key=lambda one: -one.excess)
    rows = [("parameter", "ranks", "difference", "x allowed", "ours/truth", "")]
    for one in worst[:most]:
        ranks = "all" if len(one.ranks) == world_size > 1 else ",".join(map(str, one.ranks))
        ratio = "-" if one.ratio is None else f"{one.ratio:.6g}"
        rows.append((one.name, ranks, f"{one.error:.3g}", f"{one.excess:.3g}", ratio, one.note))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, 5) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    if len(worst) > most:
        lines.append(f"  ... and {len(worst) - most} more of {len(differences)}")
    return "\n".join(lines)
