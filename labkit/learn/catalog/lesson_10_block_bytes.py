"""Lesson 10: the bytes that a transformer block sends."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.learn.catalog.lesson_10 import ITEMSIZE
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

SIZES = ((2, 16, 32, 2), (4, 32, 64, 4), (1, 8, 256, 8))


def block_sizes(rank: int, world_size: int, *, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    return sizes


def drive_number(function: Callable[..., Any], *inputs: Any) -> Any:
    value = function(*inputs)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Nonsense(describe(value), _("a number of bytes"))
    return float(value)


def is_bytes_of_block(outcome: Outcome) -> Finding:
    batch, length, width, ranks = outcome.inputs(0)
    whole, found = ITEMSIZE * batch * length * width, outcome.values[0]
    wanted = 4 * whole * 2 * (ranks - 1) / ranks
    if abs(found - wanted) < 1:
        return Finding(True)
    causes = {
        wanted / 2: _("half of it: count forward and backward, or both phases of the all-reduce"),
        wanted / 4: _("a quarter: four bytes a number, and four all-reduces"),
        4 * whole: _("an all-reduce sends 2 (N - 1) / N of the tensor, not the tensor once"),
        4 * wanted: _("four times too much: the activations that are reduced have the width d, not the inner 4 d"),
        wanted * 1.5: _("one for each layer: query, key, value and up need none"),
    }
    likely = next((words for value, words in causes.items() if abs(found - value) < 1), "")
    return Finding(
        False, _("{count:.0f} bytes").format(count=wanted), _("{count:.0f} bytes").format(count=found), likely
    )


def block(batch: int, length: int, width: int, ranks: int, *, factor: float = 1.0, naive: bool = False) -> float:
    share = 1.0 if naive else 2 * (ranks - 1) / ranks
    return factor * 4 * ITEMSIZE * batch * length * width * share


register(
    Exercise(
        id="block-bytes",
        lesson="10",
        title=_("Predict the bytes of a block"),
        dots=1,
        minutes=6,
        answer="bytes_of_block",
        hints=(
            _("Attention ends in one row-parallel layer, and so does the feed-forward part. How many sums is that?"),
            _("Two all-reduces forward and two backward, each of batch x length x width numbers of 4 bytes."),
            _("An all-reduce of K bytes sends 2 K (N - 1) / N from each rank."),
        ),
        properties=(Property("bytes", _("it is what each rank sends for one block"), is_bytes_of_block),),
        trials=tuple(
            Trial(
                _("batch {b}, length {s}, width {h}, {n} ranks").format(b=one[0], s=one[1], h=one[2], n=one[3]),
                1,
                partial(block_sizes, sizes=one),
                drive_number,
                ("batch", "length", "width", "ranks"),
            )
            for one in SIZES
        ),
        wrong_answers=(
            WrongAnswer("forward only", partial(block, factor=0.5), "bytes", "count forward and backward"),
            WrongAnswer("numbers, not bytes", partial(block, factor=0.25), "bytes", "four bytes a number"),
            WrongAnswer("the tensor once", partial(block, naive=True), "bytes", "2 (N - 1) / N"),
            WrongAnswer("the inner width", partial(block, factor=4), "bytes", "not the inner"),
            WrongAnswer("one for each layer", partial(block, factor=1.5), "bytes", "need none"),
        ),
    )
)
