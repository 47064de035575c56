"""Lesson 01: a training loop that is right and holds too much, to be repaired without changing what it computes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.learn.catalog.lesson_01 import in_bytes
from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.memory import MemoryLedger, resnet_activations
from labkit.models import resnet
from labkit.words import _

Batches = list[tuple[Tensor, Tensor]]
Given = tuple[nn.Module, torch.optim.Optimizer, Batches, Batches]
SIDE, CLASSES = 8, 10
CASES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((6, 6, 3), (6, 6, 6, 6)), ((4,), (4, 2)), ((5, 1, 5), (2,))]


def make(train: tuple[int, ...], held_out: tuple[int, ...]) -> Given:
    """A small network, its optimizer, and batches of these sizes; always the same."""
    random = torch.Generator().manual_seed(3)

    def batches(sizes: tuple[int, ...]) -> Batches:
        return [
            (torch.randn(n, 1, SIDE, SIDE, generator=random), torch.randint(CLASSES, (n,), generator=random))
            for n in sizes
        ]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = resnet(8, num_classes=CLASSES, in_channels=1, norm="group")
    return model, torch.optim.SGD(model.parameters(), lr=0.5), batches(train), batches(held_out)


def run(epoch: Any, train: tuple[int, ...], held_out: tuple[int, ...]) -> tuple[float, Tensor]:
    """The loss that a loop returns, and the weights that it leaves."""
    model, optimizer, batches, others = make(train, held_out)
    with MemoryLedger(model, optimizer) as ledger:
        ledger.track("inputs", (batches, others))
        value = epoch(model, optimizer, batches, others)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Nonsense(describe(value), _("one number, the mean loss over held_out"))
    return float(value), torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sizes_of(outcome: Outcome) -> tuple[tuple[int, ...], tuple[int, ...]]:
    keywords = outcome.trial.drive.keywords  # type: ignore[attr-defined]
    return keywords["train"], keywords["held_out"]


def mean_loss(model: nn.Module, batches: Batches) -> float:
    with torch.no_grad():
        total = sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in batches)
    return total / sum(len(y) for _x, y in batches)


def _weights(outcome: Outcome) -> Finding:
    sizes, weights = sizes_of(outcome), outcome.values[0][1]
    truth = run(as_it_was, *sizes)[1]
    if torch.allclose(weights, truth, rtol=1e-4, atol=1e-5):
        return Finding(True)
    cause = ""
    for slip, words in WEIGHT_SLIPS:
        if torch.allclose(weights, run(slip, *sizes)[1], rtol=1e-4, atol=1e-5):
            cause = words
            break
    apart = _("up to {apart:.3g} apart").format(apart=(weights - truth).abs().max().item())
    return Finding(False, _("the weights of the loop as it was"), apart, cause)


def _loss(outcome: Outcome) -> Finding:
    sizes, value = sizes_of(outcome), outcome.values[0][0]
    truth = run(as_it_was, *sizes)[0]
    if abs(value - truth) <= 1e-4 * abs(truth):
        return Finding(True)
    cause = _("it must be the mean over all samples of held_out, after the step; batches differ in size")
    return Finding(False, f"{truth:.5f}", f"{value:.5f}", cause)


def _peak(outcome: Outcome) -> Finding:
    train, held_out = sizes_of(outcome)

    def held(samples: int) -> int:
        return resnet_activations(8, batch_size=samples, side=SIDE, num_classes=CLASSES, norm="group")

    most, peak = held(max(train)), outcome.ranks[0].peak("activations") or 0
    if peak <= 1.02 * most:
        return Finding(True)
    cause = ""
    if len(held_out) > 1 and peak > 0.9 * held(sum(held_out)):
        cause = _("the graphs of all batches of held_out are alive at once: no backward frees them, and their sum "
                  "refers to them all; compute them without a graph")  # fmt: skip
    elif len(train) > 1 and peak > 0.9 * held(sum(train)):
        cause = _("the graphs of all batches are alive at once, for one backward at the end: call backward for each "
                  "batch, and its graph is freed before the next")  # fmt: skip
    elif max(held_out) > max(train):
        cause = _("held_out needs no graph at all")
    return Finding(False, _("at most {bytes} of activations").format(bytes=in_bytes(most)), in_bytes(peak), cause)


# --- the loop as it was, and plausible repairs that are none ---


def as_it_was(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    """The broken loop of the lesson: right, but it holds too much."""
    count = sum(len(y) for _x, y in batches)
    total: Any = 0
    for x, y in batches:
        total = total + F.cross_entropy(model(x), y, reduction="sum") / count
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    loss: Any = 0
    for x, y in held_out:
        loss = loss + F.cross_entropy(model(x), y, reduction="sum")
    return loss / sum(len(y) for _x, y in held_out)


def _train(model: Any, optimizer: Any, batches: Batches) -> None:
    """The right way to train, for repairs that go wrong elsewhere."""
    count = sum(len(y) for _x, y in batches)
    optimizer.zero_grad()
    for x, y in batches:
        (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
    optimizer.step()


def only_validation(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    count = sum(len(y) for _x, y in batches)
    total: Any = 0
    for x, y in batches:
        total = total + F.cross_entropy(model(x), y, reduction="sum") / count
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    return mean_loss(model, held_out)


def only_training(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    _train(model, optimizer, batches)
    loss: Any = 0
    for x, y in held_out:
        loss = loss + F.cross_entropy(model(x), y, reduction="sum")
    return loss.item() / sum(len(y) for _x, y in held_out)


def eval_mode(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    _train(model, optimizer, batches)
    model.eval()
    losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in held_out]
    return torch.stack(losses).sum().item() / sum(len(y) for _x, y in held_out)


def retains_the_graph(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    count = sum(len(y) for _x, y in batches)
    total: Any = 0
    optimizer.zero_grad()
    for x, y in batches:
        total = total + F.cross_entropy(model(x), y, reduction="sum") / count
        total.backward(retain_graph=True)
    optimizer.step()
    return mean_loss(model, held_out)


def zeroes_in_the_loop(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    count = sum(len(y) for _x, y in batches)
    for x, y in batches:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
    optimizer.step()
    return mean_loss(model, held_out)


def steps_in_the_loop(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    count = sum(len(y) for _x, y in batches)
    for x, y in batches:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
        optimizer.step()
    return mean_loss(model, held_out)


def mean_of_means(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    optimizer.zero_grad()
    for x, y in batches:
        (F.cross_entropy(model(x), y) / len(batches)).backward()
    optimizer.step()
    return mean_loss(model, held_out)


def sum_of_means(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    optimizer.zero_grad()
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return mean_loss(model, held_out)


def mean_of_held_out_means(model: Any, optimizer: Any, batches: Batches, held_out: Batches) -> Any:
    _train(model, optimizer, batches)
    return sum(mean_loss(model, [batch]) for batch in held_out) / len(held_out)


WEIGHT_SLIPS: list[tuple[Callable[..., Any], str]] = [
    (retains_the_graph, _("the loss of earlier batches goes through backward again and again: their gradients add up")),
    (zeroes_in_the_loop, _("only the last batch's gradient is left: zero the gradients once, before the loop")),
    (steps_in_the_loop, _("a step for each batch is other training: step once, after the loop")),
    (sum_of_means, _("the means of the batches add up to as many times too much: divide each sum by all samples")),
    (mean_of_means, _("batches differ in size: divide each batch's sum of losses by the number of all samples")),
]

register(
    Exercise(
        id="leak",
        lesson="01",
        title=_("A loop that holds too much"),
        dots=2,
        minutes=12,
        answer="epoch",
        hints=(
            _("A graph is alive as long as something refers to it, and holds its activations until a backward has used "
              "them. What refers to the graph of the first batch, when the last one runs?"),
            _("Gradients add up over several calls of `backward`. So each batch's part of the loss may have its own, "
              "at once. What do you still need of it then?"),
            _("Nothing calls backward for `held_out`. `torch.no_grad()` builds no graph; `.item()` gives a number that "
              "refers to none. `model.eval()` does neither."),
        ),
        properties=(
            Property("weights", _("the step leaves the same weights"), _weights),
            Property("loss", _("it returns the same loss"), _loss),
            Property("memory", _("it never holds more than the activations of one batch"), _peak),
        ),
        trials=tuple(
            Trial(
                _("batches of {train}, held out {others}").format(
                    train=", ".join(map(str, train)), others=", ".join(map(str, others))
                ),
                drive=partial(run, train=train, held_out=others),
            )
            for train, others in CASES
        ),
        wrong_answers=(
            WrongAnswer("the loop as it was", as_it_was, "memory", "of held_out are alive at once"),
            WrongAnswer("no graph in validation only", only_validation, "memory", "for one backward at the end"),
            WrongAnswer("backward in training only", only_training, "memory", "of held_out are alive at once"),
            WrongAnswer("eval mode", eval_mode, "memory", "of held_out are alive at once"),
            WrongAnswer("retain_graph", retains_the_graph, "weights", "again and again"),
            WrongAnswer("zero_grad in the loop", zeroes_in_the_loop, "weights", "only the last batch"),
            WrongAnswer("a step for each batch", steps_in_the_loop, "weights", "step once"),
            WrongAnswer("the mean of means", mean_of_means, "weights", "batches differ in size"),
            WrongAnswer("the sum of means", sum_of_means, "weights", "as many times too much"),
            WrongAnswer("the mean of held-out means", mean_of_held_out_means, "loss", "mean over all samples"),
        ),
    )
)  # fmt: skip
