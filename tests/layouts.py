"""Layouts to test with: ways to give the pieces of one tensor to a number of ranks, chosen by a seeded generator."""

import random

import torch

from labkit.mesh import Axis, Placement

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


def line(size: int, coordinate: int, name: str = "dp") -> Axis:
    return Axis(name, tuple(range(size)), coordinate)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    """Up to four dims, sizes 0 to 7, now and then none."""
    return tuple(rng.choice((0, 1, 2, 3, 3, 4, 5, 7)) for _ in range(rng.randrange(5)))


def cuts(rng: random.Random, length: int, parts: int) -> list[tuple[int, int]]:
    """A length cut at random places into `parts` ranges, some perhaps empty."""
    places = sorted(rng.randint(0, length) for _ in range(parts - 1))
    return list(zip([0, *places], [*places, length], strict=True))


def layout(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> list[Placement]:
    """The Placement of each rank: all hold the whole, or uneven slices of a dim, or flat ranges, or flat ranges of
    slices (2 x ranks/2)."""
    whole = Placement(shape, dtype)
    kind = rng.choice(("replicated", "dim", "flat", "both"))
    if kind == "dim" and shape:
        dim = rng.randrange(len(shape))
        ranges = cuts(rng, shape[dim], ranks)
        return [whole.sharded(dim, line(ranks, r), start=a, stop=b) for r, (a, b) in enumerate(ranges)]
    if kind == "flat":
        ranges = cuts(rng, whole.numel, ranks)
        return [whole.sharded_flat(a, b, line(ranks, r)) for r, (a, b) in enumerate(ranges)]
    if kind == "both" and shape and ranks % 2 == 0:
        dim, half, found = rng.randrange(len(shape)), ranks // 2, []
        for row, (a, b) in enumerate(cuts(rng, shape[dim], 2)):
            block = whole.sharded(dim, line(2, row, "tp"), start=a, stop=b)
            ranges = cuts(rng, block.numel, half)
            found += [block.sharded_flat(x, y, line(half, r)) for r, (x, y) in enumerate(ranges)]
        return found
    return [whole.replicated(line(ranks, r)) for r in range(ranks)]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose elements tell their place, as far as the dtype can."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count) % 127).to(dtype).view(shape)
