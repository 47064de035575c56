"""`labkit bench all_reduce`: our ring beside gloo's all-reduce, from 4 KiB to 64 MiB on 2 ranks, turn about.

Checks of messages are switched off.
"""

import torch
import torch.distributed as dist

from labkit.bench.side_by_side import Comparison, take_turns
from labkit.collectives import all_reduce
from labkit.ranks import Ranks

TARGET = 0.9  # of gloo's time, from this size on:
TARGET_BYTES = 64 * 1024
SIZES = tuple(4**exponent * 1024 for exponent in range(1, 9))


def turns(nbytes: int, steps: int) -> list[list[float]]:
    """On each rank: the ring, gloo, and gloo once more, on tensors of their own."""
    tensors = [torch.ones(nbytes // 4) for _ in range(3)]

    def ours() -> None:
        all_reduce(tensors[0])

    def theirs(which: int) -> None:
        dist.all_reduce(tensors[which])

    for tensor in tensors:
        tensor.zero_()  # sums of zeros neither grow nor slow down
    return take_turns([ours, lambda: theirs(1), lambda: theirs(2)], steps=steps)


def bench_all_reduce() -> dict[str, float]:
    """Print a line for each size; returns the median ratios by size. Under a minute on 2 cores."""
    print("all_reduce: float32, 2 ranks of 1 thread, checks of messages off")
    ratios: dict[str, float] = {}
    with Ranks(2, check=False) as ranks:
        for nbytes in SIZES:
            steps = 200 if nbytes < 1 << 20 else 60 if nbytes < 1 << 24 else 30
            found = Comparison.of(ranks.run(turns, nbytes, steps))
            name = f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"
            target = TARGET if nbytes >= TARGET_BYTES else None
            print(found.line(f"all_reduce {name}", target=target, of_whom="gloo's"))
            ratios[name] = found.ratio.median
    return ratios
