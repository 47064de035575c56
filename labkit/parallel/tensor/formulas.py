"""What a transformer block sends and holds when its layers are shared out, by formula.

To be held against what recorder and ledger count. A block has K = b s h activations, for b sequences of s tokens and
width h, on N ranks.

    sequence      forward                              backward
    "none"        2 all-reduces of K                   2 all-reduces of K
    "gathered"    2 all-gathers, 2 reduce-scatters     the same, and gradients of norms and biases
    "shards"      2 all-gathers, 2 reduce-scatters     2 all-gathers more, in front of the column-parallel layers

Sources: Shoeybi and others, Megatron-LM (2019), arXiv:1909.08053, section 3; Korthikanti and others (2022),
arXiv:2205.05198, section 4 and Table 2.
"""

import math
from dataclasses import dataclass

import torch

from labkit.collectives.circulation import PIECE_BYTES
from labkit.collectives.formulas import Sent, all_reduce_sent

SEQUENCES = ("none", "gathered", "shards")


@dataclass(frozen=True)
class BlockShape:
    """`labkit.models.transformer`'s block and its batch; `d_ff` is 4 `d_model` if not given."""

    batch_size: int
    length: int
    d_model: int
    num_heads: int
    d_ff: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def elements(self) -> int:
        """K, the numbers that a block takes and gives."""
        return self.batch_size * self.length * self.d_model


def block_sent(shape: BlockShape, ranks: int, *, sequence: str = "none") -> dict[str, Sent]:
    """Bytes and messages that each rank sends for one block, "forward" and "backward".

    A collective of K elements moves K (N - 1) / N in a gather or a reduce-scatter, twice that in an all-reduce.
    """
    _check(sequence)
    e, whole = shape.dtype.itemsize, shape.elements
    if sequence == "none":
        twice = _sum([all_reduce_sent("ring", whole, e, ranks)] * 2, ranks)
        return {"forward": twice, "backward": twice}
    part = _part_sent(whole // ranks, e, ranks)
    # of each norm weight and bias together; of the biases of the two row-parallel layers, which see shards too
    small = [all_reduce_sent("ring", count, e, ranks) for count in (2 * shape.d_model, shape.d_model)] * 2
    again = [part] * (2 if sequence == "shards" else 0)
    return {"forward": _sum([part] * 4, ranks), "backward": _sum([part] * 4 + small + again, ranks)}


def block_activations_per_rank(
    shape: BlockShape, ranks: int, *, sequence: str = "none", dropout: bool = False
) -> float:
    """Bytes that one block holds for backward on each rank, its input included, on the CPU.

    The terms are those of `labkit.memory.activation_formulas`, here by what happens to them: the inputs and outputs of
    the norms are replicated (4 h for each token), or in shards, where "gathered" keeps the two column-parallel inputs
    whole (2 h) and "shards" does not. Attention and feed-forward layers always divide by N. The padding mask, s numbers
    for each token in the fused kernel, does not.
    """
    _check(sequence)
    h, s, a, f = shape.d_model, shape.length, shape.num_heads, shape.d_ff or 4 * shape.d_model
    e, tokens = shape.dtype.itemsize, shape.batch_size * shape.length
    norms = {"none": 4 * h + 4, "gathered": 2 * h + (2 * h + 4) / ranks, "shards": (4 * h + 4) / ranks}[sequence]
    numbers = norms + (4 * h + 2 * f) / ranks
    if dropout:
        masks = 2 * h / (1 if sequence == "none" else ranks)
        return tokens * e * (numbers + masks + (3 * a * s + f) / ranks)
    return tokens * (e * (numbers + s) + a * max(4, shape.dtype.itemsize) / ranks)


def published_block_activations(
    shape: BlockShape, ranks: int, *, sequence: str = "none", numbers: int = 2, mask: int = 1
) -> float:
    """Bytes that a block holds by Korthikanti and others, Table 2, from what they count (section 4.1).

    Of `numbers` bytes: 4 h for each token at the norms; 12 h in the layers; softmax and its product with the mask,
    2 a s. Of `mask` bytes: dropout behind the two sublayers, 2 h, and in the attention, a s. No fused kernel. With 2
    and 1 bytes that is s b h (34 + 5 a s / h) on one rank; 10 + 24 / t with tensor parallelism; and 34 / t where only
    shards are kept. "gathered" is not in the table: 4 + 30 / t.
    """
    _check(sequence)
    h, s, a = shape.d_model, shape.length, shape.num_heads
    whole = {"none": numbers * 4 * h + mask * 2 * h, "gathered": numbers * 2 * h, "shards": 0}[sequence]
    everything = numbers * 16 * h + mask * 2 * h
    scores = (2 * numbers + mask) * a * s
    return shape.batch_size * s * (whole + (everything - whole + scores) / ranks)


def loss_sent(targets: int, ranks: int, *, itemsize: int = 4, label_smoothing: bool = False) -> Sent:
    """What `loss_parallel` sends for `targets` targets: the largest logits, and 2 sums (3 with label smoothing).

    The first all-reduce carries the width of each rank's slice behind the largest logits, N numbers more.
    """
    sums = 3 if label_smoothing else 2
    counts = (targets + ranks, sums * targets)
    return _sum([all_reduce_sent("ring", count, itemsize, ranks) for count in counts], ranks)


def _part_sent(part: int, itemsize: int, ranks: int) -> Sent:
    """What an all-gather or a reduce-scatter of parts of `part` elements sends."""
    messages = (ranks - 1) * max(1, math.ceil(part / max(1, PIECE_BYTES // itemsize)))
    return Sent([(ranks - 1) * part * itemsize] * ranks, [messages] * ranks)


def _sum(parts: list[Sent], ranks: int) -> Sent:
    return Sent(
        [sum(part.bytes[rank] for part in parts) for rank in range(ranks)],
        [sum(part.messages[rank] for part in parts) for rank in range(ranks)],
    )


def _check(sequence: str) -> None:
    if sequence not in SEQUENCES:
        raise ValueError(f"sequence is {sequence!r}; give one of {', '.join(SEQUENCES)}")
