"""Lesson 01: the activations of a stack of transformer blocks, as batch, length, width and depth grow."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from labkit.learn.catalog.lesson_01 import byte_count, in_bytes, same
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.memory import MemoryLedger
from labkit.models import transformer
from labkit.words import _

WITHIN = 0.05
Sizes = tuple[int, int, int, int, int]  # batch, length, width, heads, blocks
TRIALS: dict[str, list[Sizes]] = {
    "size": [(6, 24, 64, 4, 1)],
    "batch": [(12, 24, 64, 4, 1), (1, 24, 64, 4, 1)],
    "depth": [(6, 24, 64, 4, 2), (6, 24, 64, 4, 5)],
    "length": [(3, 256, 32, 4, 2), (6, 64, 64, 4, 1)],
    "width": [(6, 24, 128, 4, 1), (6, 24, 32, 4, 1)],
}


def count_activations(activation_bytes: Any, *sizes: int) -> tuple[float, int]:
    """What the learner says, and what the blocks really hold."""
    said = byte_count(activation_bytes(*sizes), _("a number of bytes"))
    batch, length, width, heads, blocks = sizes
    net = transformer(vocab_size=50, d_model=width, num_layers=blocks, num_heads=heads, max_len=length, num_classes=2)
    with MemoryLedger(net) as ledger:
        logits = net(torch.ones(batch, length, dtype=torch.int64))
        held = ledger.now().by_module("activations")
    assert logits.requires_grad
    return said, sum(count for name, count in held.items() if name.startswith("blocks."))


def sizes_of(rank: int, world_size: int, *, sizes: Sizes) -> tuple[int, ...]:
    return sizes


def grows(group: str, outcome: Outcome) -> Finding:
    """Right in the trials of one group; others are passed over."""
    sizes = outcome.inputs(0)
    if sizes not in TRIALS[group]:
        return Finding(True)
    said, held = outcome.values[0]
    if same(said, held, WITHIN):
        return Finding(True)
    cause = next((cause for slip, cause in SLIPS if same(said, slip(*sizes), 0.02)), "")
    return Finding(False, in_bytes(held), in_bytes(said), cause)


# --- plausible wrong answers ---


def _right(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return 4 * blocks * batch * length * (16 * width + heads + length + 4)


def numbers_not_bytes(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return _right(batch, length, width, heads, blocks) / 4


def from_the_paper(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return blocks * length * batch * width * (34 + 5 * heads * length / width)


def paper_doubled(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return 2 * from_the_paper(batch, length, width, heads, blocks)


def one_block(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return _right(batch, length, width, heads, 1)


def without_projections(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return 4 * blocks * batch * length * (13 * width + heads + length + 4)


def every_output(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return 4 * blocks * batch * length * (19 * width + heads + length + 4)


def without_the_mask(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return 4 * blocks * batch * length * (16 * width + heads + 4)


def mask_for_each_head(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return 4 * blocks * batch * length * (16 * width + heads * length + 4)


def one_mask(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return 4 * blocks * length * (batch * (16 * width + heads + 4) + length)


def of_one_sample(batch: int, length: int, width: int, heads: int, blocks: int) -> float:
    return _right(1, length, width, heads, blocks)


SLIPS: list[tuple[Callable[..., float], str]] = [
    (numbers_not_bytes, _("that is how many numbers there are; in float32 each takes 4 bytes")),
    (from_the_paper, _("that is the formula for numbers of 2 bytes, dropout, and attention that holds its softmax")),
    (paper_doubled, _("the fused attention holds no softmax and without dropout there are no masks of it: count anew")),
    (one_block, _("every block holds its own")),
    (without_projections, _("query, key and value are held too: attention needs them for its backward")),
    (every_output, _("not all that is computed is held: what is only added to something is not needed again")),
    (of_one_sample, _("every sample of the batch has its own")),
    (mask_for_each_head, _("the padding mask is the same for all heads: s x s numbers for each sample and block")),
    (one_mask, _("each sample has its own padding mask")),
    (without_the_mask, _("the padding mask is held as numbers: s x s of them for each sample and block")),
]

STATEMENTS = {
    "size": _("it is right for one block, within 5 percent"),
    "batch": _("it grows with the batch as the memory does"),
    "depth": _("it grows with the number of blocks as the memory does"),
    "length": _("it grows with the length as the memory does"),
    "width": _("it grows with the width as the memory does"),
}

register(
    Exercise(
        id="activation-bytes",
        lesson="01",
        title=_("What a stack of blocks holds"),
        dots=2,
        minutes=10,
        answer="activation_bytes",
        hints=(
            _("Look at the picture of what one block holds. Its unit is one number for each token and each of the "
              "`width` features: `batch * length * width` numbers, 4 bytes each. Add the bars up."),
            _("The bars add up to 16, and a little more in `attention` and the norms. That little does not grow with "
              "the width; for long texts it is no longer little."),
            _("Beside the 16, for each token: `length` numbers of the padding mask, one number a head, and 4 of the "
              "norms. How many tokens are there, and how many blocks?"),
        ),
        properties=tuple(Property(group, STATEMENTS[group], partial(grows, group)) for group in TRIALS),
        trials=tuple(
            Trial(
                _("batch {}, length {}, width {}, heads {}, blocks {}").format(*sizes),
                inputs=partial(sizes_of, sizes=sizes),
                drive=count_activations,
                input_names=("batch", "length", "width", "heads", "blocks"),
            )
            for group in TRIALS.values()
            for sizes in group
        ),
        wrong_answers=(
            WrongAnswer("numbers, not bytes", numbers_not_bytes, "size", "how many numbers there are"),
            WrongAnswer("the paper's formula", from_the_paper, "size", "numbers of 2 bytes"),
            WrongAnswer("the paper's formula doubled", paper_doubled, "size", "fused attention holds no softmax"),
            WrongAnswer("without query, key and value", without_projections, "size", "query, key and value"),
            WrongAnswer("every output", every_output, "size", "only added to something"),
            WrongAnswer("one sample", of_one_sample, "size", "every sample of the batch"),
            WrongAnswer("one block", one_block, "depth", "every block"),
            WrongAnswer("a mask for each head", mask_for_each_head, "size", "same for all heads"),
            WrongAnswer("one mask for all samples", one_mask, "length", "its own padding mask"),
            WrongAnswer("without the mask", without_the_mask, "length", "padding mask is held"),
        ),
    )
)  # fmt: skip
