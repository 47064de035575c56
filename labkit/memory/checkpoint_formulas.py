"""The peak of activations under checkpointing, from what each block holds, and which blocks are checkpoints.

A checkpoint of blocks i to j holds the input of block i. At the end of forward that is held for each checkpoint, and
for every other block what it holds as ever. When backward comes to a checkpoint, all that its blocks hold is there at
once, beside what is held for the blocks before it. So the peak of L blocks in checkpoints of k is about

    (L / k) border + k inside,   least at k = sqrt(L border / inside)

which is Chen and others' sqrt(L) where a block holds no more than its input: T. Chen and others, Training Deep Nets
with Sublinear Memory Cost (2016), arXiv:1604.06174, section 4.1. A block of a transformer holds 16 times its input.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labkit.memory.activation_formulas import block_activations, transformer_activations
from labkit.memory.residual_formulas import residual_blocks, residual_head, resnet_activations


@dataclass(frozen=True)
class BlockCost:
    """What a block costs: bytes, and seconds of its forward.

    `border` is its input; `inside` what it holds for backward besides its input and its output; `output` the bytes of
    its output if it holds that, else 0; `kept` what a checkpoint of it holds besides its input, 0 unless selective.
    """

    border: int
    inside: int
    output: int = 0
    seconds: float = 0.0
    kept: int = 0


def checkpointed_peak(
    blocks: Sequence[BlockCost], groups: Sequence[range], *, before: int = 0, after: int = 0, input_held: bool = False
) -> int:
    """Bytes of activations at the peak, where the blocks of each of `groups` are one checkpoint, the others none.

    `before` and `after` are held at the end of forward by what comes before and after the blocks. `input_held`: the
    first block's input is in `before`.
    """
    held, peak, place, there = before, 0, 0, input_held
    for group in [*groups, range(len(blocks), len(blocks))]:
        for number in range(place, group.start):
            held, there = held + stored_bytes(blocks[number], there), bool(blocks[number].output)
        if len(group):
            first = 0 if there else blocks[group.start].border
            peak = max(peak, held + first + recomputed_bytes(blocks, group))
            held, there = held + first + sum(blocks[number].kept for number in group), False
        place = group.stop
    return max(peak, held + after)


def stored_bytes(block: BlockCost, input_is_there: bool) -> int:
    """What a block that is not checkpointed adds to what is held."""
    return (0 if input_is_there else block.border) + block.inside + block.output


def recomputed_bytes(blocks: Sequence[BlockCost], group: range) -> int:
    """What a checkpoint's recomputation adds to what is held, the input of its first block aside."""
    added = 0
    for number in group:
        there = number == group.start or bool(blocks[number - 1].output)
        added += stored_bytes(blocks[number], there)
    return added


def transformer_costs(
    *,
    batch_size: int,
    length: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int | None = None,
    dropout: bool = False,
    selective: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[BlockCost]:
    """The blocks of labkit's transformer, as `checkpointed_peak` takes them.

    With `selective` the outputs of all linear layers and of fused attention are kept: six of h and one of f, and the
    fused kernel's log of sums. Two of them, the outputs of the sublayers, would not be held otherwise; with dropout
    query, key and value neither, since the plain attention holds copies that it has scaled.
    """
    h, f, e, tokens = d_model, d_ff or 4 * d_model, dtype.itemsize, batch_size * length
    border = e * tokens * h
    sizes = {"length": length, "d_model": h, "num_heads": num_heads, "d_ff": f, "dropout": dropout, "dtype": dtype}
    inside = block_activations(batch_size=batch_size, **sizes) - border  # type: ignore[arg-type]
    kept = 0
    if selective:
        fused = 0 if dropout else e * tokens * h + tokens * num_heads * max(4, e)
        kept = e * tokens * (5 * h + f) + fused
        inside += e * tokens * (5 if dropout else 2) * h
    return [BlockCost(border, inside, kept=kept)] * num_layers


def checkpointed_transformer(
    groups: Sequence[range], *, num_classes: int | None = None, vocab_size: int | None = None, selective: bool = False,
    batch_size: int, length: int, d_model: int, num_layers: int, num_heads: int, d_ff: int | None = None,
    dropout: bool = False, dtype: torch.dtype = torch.float32,
) -> int:  # fmt: skip
    """The peak of activations of labkit's transformer and the cross-entropy; arguments as `transformer_activations`."""
    shape = {"batch_size": batch_size, "length": length, "d_model": d_model, "num_heads": num_heads, "d_ff": d_ff,
             "dropout": dropout, "dtype": dtype}  # fmt: skip
    blocks = transformer_costs(num_layers=num_layers, selective=selective, **shape)  # type: ignore[arg-type]
    around = transformer_activations(num_layers=0, num_classes=num_classes, vocab_size=vocab_size, **shape)  # type: ignore[arg-type]
    before = 8 * length + (dtype.itemsize * batch_size * length * d_model if dropout else 0)
    mask = batch_size * length if groups else 0  # which tokens are valid, an argument of every block
    return checkpointed_peak(blocks, groups, before=before + mask, after=around - before)


def checkpointed_resnet(
    depth: int, groups: Sequence[range], *, batch_size: int, side: int, num_classes: int, stem: str = "small",
    norm: str = "batch", dtype: torch.dtype = torch.float32,
) -> int:  # fmt: skip
    """The peak of activations of labkit's residual network and the cross-entropy; arguments as `resnet_activations`."""
    e, whole = (
        dtype.itemsize,
        resnet_activations(
            depth, batch_size=batch_size, side=side, num_classes=num_classes, stem=stem, norm=norm, dtype=dtype
        ),
    )
    sizes = residual_blocks(depth, batch_size=batch_size, side=side, stem=stem, norm=norm)
    blocks = [BlockCost(border=e * into, inside=e * (held - out), output=e * out) for into, held, out in sizes]
    after = residual_head(depth, batch_size, num_classes, dtype)
    before = whole - after - sum(block.inside + block.output for block in blocks)
    return checkpointed_peak(blocks, groups, before=before, after=after, input_held=True)


def best_length(costs: Sequence[BlockCost]) -> int:
    """How many of these blocks in one checkpoint give the least peak, all checkpoints being as long."""
    count = len(costs)

    def peak(k: int) -> int:
        return checkpointed_peak(costs, [range(i, min(i + k, count)) for i in range(0, count, k)])

    return min(range(1, count + 1), key=peak)


def sublinear(layers: int, *, border: float, inside: float) -> tuple[float, float]:
    """Bytes at the peak of so many equal layers: without checkpoints, and with the best of equal ones, by the formula
    above with real numbers: 2 sqrt(L border inside)."""
    return layers * inside, 2 * math.sqrt(layers * border * inside)
