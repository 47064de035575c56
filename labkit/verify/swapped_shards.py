"""Whether a wrong tensor is the true one with its shards in another order."""

from itertools import permutations

from torch import Tensor

from labkit.verify.failure import Cause, Failure
from labkit.verify.nearness import near
from labkit.verify.splitting import even_sizes


def swapped_shards(failure: Failure) -> Cause | None:
    """The cause, where changing the places of its shards, along a dim or flat, puts every wrong tensor right."""
    size, told = failure.task.world_size, ""
    for rank, name in failure.pairs:
        ours, true = failure.ours(rank, name), failure.true(name)
        if ours is None or true is None:
            return None
        found = next((order for parts in (size, 2, 3, 4) if (order := _order(ours, true, parts))), None)
        if found is None:
            return None
        told = told or f"{name!r}: {found}"
    return Cause("swapped shards", f"shards stand in the wrong order ({told})")


def _order(ours: Tensor, true: Tensor, parts: int) -> str:
    """In words which shard stands in each place; "" where no order of equal shards explains it."""
    along = [(f"dim {dim}", ours, true, dim) for dim in range(true.dim())]
    for words, a, b, dim in [*along, ("flattened", ours.reshape(-1), true.reshape(-1), 0)]:
        if not 1 < parts <= b.shape[dim]:
            continue
        sizes = even_sizes(b.shape[dim], parts)
        mine, theirs = a.split(sizes, dim), b.split(sizes, dim)
        for order in list(permutations(range(parts)))[1:]:
            if all(near(mine[place], theirs[shard]) for place, shard in enumerate(order)):
                return f"{words}, shards {', '.join(map(str, order))} in the places 0 to {parts - 1}"
    return ""
