"""What each block of a network costs, measured: bytes that it holds for backward, and seconds of its forward."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from labkit.memory.checkpoint_formulas import BlockCost, checkpointed_peak
from labkit.memory.checkpoint_policies import are_checkpointed, blocks_of
from labkit.memory.storages import storages


@dataclass(frozen=True)
class MeasuredBlocks:
    """The blocks of a network, and the bytes held at the end of forward by what comes `before` and `after` them."""

    blocks: tuple[BlockCost, ...]
    before: int
    after: int
    input_held: bool

    def peak(self, groups: Sequence[range]) -> int:
        """Bytes of activations at the peak, the blocks of each group being one checkpoint."""
        options = {"before": self.before, "after": self.after, "input_held": self.input_held}
        return checkpointed_peak(self.blocks, groups, **options)  # type: ignore[arg-type]

    def seconds(self, groups: Sequence[range]) -> float:
        """Seconds that a step takes longer: the forward of what is recomputed."""
        return sum(self.blocks[number].seconds for group in groups for number in group)


def measure_blocks(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    blocks: Sequence[nn.Module] | None = None,
    repeats: int = 3,
) -> MeasuredBlocks:
    """Run `model(*inputs)`, and `loss` of its output, and count what each block holds; time it `repeats` times.

    The model has no checkpoints. Blocks are those that `checkpoint_blocks` takes. What they hold is counted once: a
    tensor that two of them hold is the input of the second. The first argument of a block is its input; what others
    bring is counted as coming before the blocks.
    """
    found = list(blocks) if blocks is not None else blocks_of(model)
    if are_checkpointed(found):
        raise ValueError(
            "measure_blocks: the blocks are checkpoints already, which hold next to nothing: take that back "
            'with checkpoint_blocks(model, "none") first.'
        )
    own = {storage._cdata for storage in storages([*model.parameters(), *model.buffers(), *inputs])}
    seen: dict[int, tuple[int, int]] = {}  # a storage: who saved it first, and its bytes
    ends: list[tuple[Tensor, Tensor]] = [None] * len(found)  # type: ignore[list-item]
    others: dict[int, int] = {}
    place = [-1]  # before the blocks; len(found) is after

    def saved(tensor: Tensor) -> Tensor:
        for storage in storages(tensor):
            if storage._cdata not in own:
                seen.setdefault(storage._cdata, (place[0], storage.nbytes()))
        return tensor.detach()

    def begins(number: int, args: Any, kwargs: Any) -> None:
        place[0] = number
        for storage in storages([args[1:], kwargs]):
            others[storage._cdata] = storage.nbytes()

    def ended(number: int, args: Any, output: Any) -> None:
        place[0] = number + 1 if number + 1 == len(found) else number
        ends[number] = (_first(args), _first(output))

    seconds = _times(found, lambda: model(*inputs), repeats)
    with _around(found, begins, ended), saved_tensors_hooks(saved, lambda kept: kept):
        output = model(*inputs)
        if loss is not None:
            output = loss(output)
    costs = []
    for number, (into, out) in enumerate(ends):
        keys = [next(storages(end))._cdata for end in (into, out)]
        mine = {key: nbytes for key, (who, nbytes) in seen.items() if who == number and key not in others}
        held = mine.pop(keys[1], 0)
        mine.pop(keys[0], 0)
        border = next(storages(into)).nbytes()
        costs.append(BlockCost(border, sum(mine.values()), held, seconds[number]))
    first = next(storages(ends[0][0]))._cdata
    before = sum(nbytes for key, (who, nbytes) in seen.items() if who == -1 and key not in others)
    after = sum(nbytes for key, (who, nbytes) in seen.items() if who == len(found) and key not in others)
    input_held = first in own or seen.get(first, (0, 0))[0] == -1
    return MeasuredBlocks(tuple(costs), before + sum(others.values()), after, input_held)


def _times(blocks: Sequence[nn.Module], run: Callable[[], Any], repeats: int) -> list[float]:
    """The median seconds of each block's forward."""
    starts, taken = [0.0] * len(blocks), [list[float]() for _ in blocks]

    def begins(number: int, *_: Any) -> None:
        starts[number] = time.perf_counter()

    def ended(number: int, *_: Any) -> None:
        taken[number].append(time.perf_counter() - starts[number])

    with _around(blocks, begins, ended):
        for _ in range(repeats + 1):  # the first is slower
            run()
    return [statistics.median(each[1:]) for each in taken]


@contextlib.contextmanager
def _around(blocks: Sequence[nn.Module], begins: Callable[..., None], ended: Callable[..., None]) -> Iterator[None]:
    with contextlib.ExitStack() as hooks:
        for number, block in enumerate(blocks):

            def before(_: Any, args: Any, kwargs: Any, number: int = number) -> None:
                begins(number, args, kwargs)

            def after(_: Any, args: Any, output: Any, number: int = number) -> None:
                ended(number, args, output)

            hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(after).remove)
        yield


def _first(value: Any) -> Tensor:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            return leaf
    raise ValueError("A block must take and return a tensor first.")
