"""Measure what simple models and ours reach on the embedded sets: `python data/baselines.py [--write]`.

Text: a linear model on TF-IDF of words and pairs of words (scikit-learn), and a small transformer. Images: a linear
model on the pixels, and the smallest ResNet, for 4 epochs on the first 10,000 images. One process, one thread, seed
0. `--write` puts the figures into the data cards.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import sklearn
import torch
import torch.nn.functional as F
from building import HERE, write_baselines
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC
from torch import Tensor, nn

from labkit.data.image_sets import images
from labkit.data.text_sets import read_text, text
from labkit.models import resnet, transformer

SEED, IMAGES = 0, 10_000


class Batches(Protocol):
    """What training needs of a set."""

    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]: ...


def fit(
    model: nn.Module, train: Batches, test: Batches, optimizer: torch.optim.Optimizer, *, epochs: int, batch_size: int
) -> tuple[float, float]:
    """Train with a one-cycle schedule; accuracy on the test split and seconds of training."""
    peak = float(optimizer.param_groups[0]["lr"])
    steps = epochs * (len(train) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps)
    shuffle = torch.Generator().manual_seed(SEED)
    start = time.perf_counter()
    for epoch in range(epochs):
        model.train()
        train.set_epoch(epoch)
        for indices in torch.randperm(len(train), generator=shuffle).split(batch_size):
            if len(indices) < batch_size:
                continue
            inputs, targets = train.batch(indices)
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"  epoch {epoch + 1} of {epochs}: {time.perf_counter() - start:.0f} s", flush=True)
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        batches = (test.batch(indices) for indices in torch.arange(len(test)).split(250))
        correct = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in batches)
    return correct / len(test), seconds


def tfidf() -> tuple[str, float, float]:
    train, test = read_text("wordnet-topics", "train"), read_text("wordnet-topics", "test")
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LinearSVC(C=0.5, random_state=SEED))
    start = time.perf_counter()
    model.fit(train.texts, train.labels)
    seconds = time.perf_counter() - start
    name = "TF-IDF of words and pairs of words, linear SVM (C=0.5), scikit-learn"
    return name, float(model.score(test.texts, test.labels)), seconds


def small_transformer() -> tuple[str, float, float]:
    torch.manual_seed(SEED)
    train, test = text(max_len=48), text(split="test", max_len=48)
    model = transformer(
        vocab_size=train.vocab_size, num_classes=len(train.classes), d_model=64, num_layers=2, max_len=48, dropout=0.1
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    accuracy, seconds = fit(model, train, test, optimizer, epochs=4, batch_size=64)
    name = "`transformer`, 2 layers, d_model 64, 48 tokens, dropout 0.1; AdamW, one cycle to 3e-3, 4 epochs, batch 64"
    return name, accuracy, seconds


def pixels() -> tuple[str, float, float]:
    (train, train_labels), (test, test_labels) = (
        part.batch(range(len(part))) for part in (images(limit=IMAGES), images(split="test"))
    )
    model = LogisticRegression(C=0.01, max_iter=2000)
    start = time.perf_counter()
    model.fit(train.flatten(1).numpy(), train_labels.numpy())
    seconds = time.perf_counter() - start
    accuracy = float(model.score(test.flatten(1).numpy(), test_labels.numpy()))
    return (
        f"logistic regression on the pixels (C=0.01), scikit-learn, the first {IMAGES:,} train images",
        accuracy,
        seconds,
    )


def small_resnet() -> tuple[str, float, float]:
    torch.manual_seed(SEED)
    model = resnet(8, num_classes=10, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4, nesterov=True)
    train, test = images(limit=IMAGES, seed=SEED), images(split="test")
    accuracy, seconds = fit(model, train, test, optimizer, epochs=4, batch_size=128)
    name = (
        f"`resnet(8)`, the first {IMAGES:,} train images; SGD with momentum 0.9, one cycle to 0.2, 4 epochs, batch 128"
    )
    return name, accuracy, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the figures into the data cards")
    parser.add_argument("--only", choices=["wordnet-topics", "fashion-mnist"], help="one of the sets")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measurements: dict[str, list[Callable[[], tuple[str, float, float]]]] = {
        "wordnet-topics": [tfidf, small_transformer],
        "fashion-mnist": [pixels, small_resnet],
    }
    for name in [arguments.only] if arguments.only else measurements:
        lines = ["| model | test accuracy |", "|---|---:|"]
        for measure in measurements[name]:
            model, accuracy, seconds = measure()
            print(f"{name}: {model}: {accuracy:.1%} in {seconds:.0f} s", flush=True)
            lines.append(f"| {model} | {accuracy:.1%} |")
        note = (
            "Measured by `data/baselines.py`: accuracy on the whole test split after training on the train split, "
            f"one run, seed {SEED}, one process, one CPU thread, torch {torch.__version__}, "
            f"scikit-learn {sklearn.__version__}."
        )
        if arguments.write:
            write_baselines(HERE / name / "CARD.md", "\n".join([*lines, "", note]))


if __name__ == "__main__":
    main()
