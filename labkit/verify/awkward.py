"""The awkward models: small networks, each with one thing that parallel code likes to get wrong.

`CASES` lists them by name, the two workloads among them, so that every technique is tested over all:
`assert_equivalent(case.build, case.batch(), case.loss, parallelize, 2, optimizer, reference=case.reference)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.models import resnet, transformer
from labkit.verify.courses import Build, Loss

IGNORED = -100  # a target that does not count


@dataclass(frozen=True)
class Case:
    """One awkward model with its batch and loss.

    `reference` is "whole", or "replay" where the result depends on how the batch is cut. `unused` says that some
    rank's backward pass may leave a parameter without gradient. `notes` says what is awkward.
    """

    name: str
    build: Build
    batch: Callable[[], tuple[Any, Any]]
    loss: Loss
    notes: str
    reference: str = "whole"
    unused: bool = False


def classes_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The sum of the cross-entropies, and the number of samples."""
    return F.cross_entropy(output, targets, reduction="sum"), len(targets)


def tokens_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies over the targets that count, and their number."""
    total = F.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def vectors(rows: int = 8, *, width: int = 6, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs [rows, width] and classes [rows], always the same."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=random), torch.randint(classes, (rows,), generator=random)


def pictures(rows: int = 8, *, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Images [rows, 3, 8, 8] and classes [rows]."""
    random = torch.Generator().manual_seed(2)
    return torch.randn(rows, 3, 8, 8, generator=random), torch.randint(classes, (rows,), generator=random)


def documents(rows: int = 8, *, vocabulary: int = 11, length: int = 6, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length] of different lengths, padded with 0, and classes [rows]."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, vocabulary, (rows, length), generator=random)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=random)
    return tokens * (torch.arange(length) < lengths), torch.randint(classes, (rows,), generator=random)


def continuations(rows: int = 8, *, vocabulary: int = 11, length: int = 6) -> tuple[Tensor, Tensor]:
    """Token ids and next tokens, both [rows, length]; row i has only i + 1 targets that count, at most `length`."""
    random = torch.Generator().manual_seed(4)
    stream = torch.randint(1, vocabulary, (rows, length + 1), generator=random)
    counts = torch.arange(length) < torch.arange(1, rows + 1)[:, None]
    return stream[:, :-1], torch.where(counts, stream[:, 1:], IGNORED)


def plain() -> nn.Module:
    """Three layers, nothing awkward."""
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 5))


def frozen() -> nn.Module:
    """The first and the third parameter don't train."""
    module = plain()
    for name in ("0.weight", "2.weight"):
        module.get_parameter(name).requires_grad_(False)
    return module


class Tied(nn.Module):
    """One matrix at both ends: as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.middle = nn.Linear(7, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.head(torch.tanh(self.middle(self.embedding(tokens)))))


class Unused(nn.Module):
    """A layer that `forward` never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(torch.tanh(self.first(x))))


class SometimesUsed(nn.Module):
    """A layer that only samples with a large first feature pass: whoever has none leaves it without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, chosen = torch.tanh(self.first(x)), x[:, 0] > 5
        if chosen.any():
            y = y.index_add(0, chosen.nonzero()[:, 0], torch.tanh(self.sometimes(y[chosen])))
        return cast(Tensor, self.last(y))


def one_large(rows: int = 8) -> tuple[Tensor, Tensor]:
    """As `vectors`, but the last sample's first feature is large: only the last rank has one."""
    inputs, targets = vectors(rows)
    inputs[-1, 0] = 6.0
    return inputs, targets


def normalised() -> nn.Module:
    """Convolution and BatchNorm."""
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), *head)


def dropping() -> nn.Module:
    """Dropout between two layers."""
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 5))


class Mixed(nn.Module):
    """A layer in float64 among layers of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exact = nn.Linear(6, 7), nn.Linear(7, 7, dtype=torch.float64)
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.exact(self.first(x).double()))
        return cast(Tensor, self.last(y.to(self.last.weight.dtype)))


def image_workload() -> nn.Module:
    """The ResNet of depth 8 with group norm."""
    return resnet(8, num_classes=5, norm="group")


def text_workload() -> nn.Module:
    """A transformer encoder of two layers that classifies."""
    return transformer(vocab_size=11, d_model=16, num_layers=2, num_heads=2, max_len=6, num_classes=5)


def tokens_workload() -> nn.Module:
    """A causal transformer of two layers whose token head is tied to the embedding."""
    return transformer(vocab_size=11, d_model=16, num_layers=2, num_heads=2, max_len=6, causal=True, head="token")


_ALL = [
    Case("plain", plain, vectors, classes_loss, "nothing awkward"),
    Case("uneven", plain, partial(vectors, 5), classes_loss, "5 samples: 3 and 2 on two ranks"),
    Case("frozen", frozen, vectors, classes_loss, "two parameters that don't train"),
    Case("tied", Tied, continuations, tokens_loss, "one matrix used twice; ranks have different numbers of tokens"),
    Case("unused", Unused, vectors, classes_loss, "a layer that no rank uses", unused=True),
    Case("unused on one", SometimesUsed, one_large, classes_loss, "a layer that only the last rank uses", unused=True),
    Case("batch norm", normalised, pictures, classes_loss, "statistics of the rank's share", "replay"),
    Case("dropout", dropping, vectors, classes_loss, "a mask of each rank's own", "replay"),
    Case("mixed dtypes", Mixed, vectors, classes_loss, "a float64 layer among others"),
    Case("image", image_workload, pictures, classes_loss, "the workload with images"),
    Case("text", text_workload, documents, classes_loss, "the workload with text; documents of different lengths"),
    Case(
        "tokens", tokens_workload, continuations, tokens_loss, "causal, tied, different numbers of valid tokens a rank"
    ),
]

#: every case by its name
CASES = {case.name: case for case in _ALL}
