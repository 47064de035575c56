"""Build the embedded image set from the Debian package `dataset-fashion-mnist`.

    apt-get install dataset-fashion-mnist && python data/build_fashion_mnist.py

The cut is the first 2,000 training and the first 400 test images of each class, in the original order. The
original order is already shuffled, so that this needs no random numbers and every prefix stays about balanced.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt
from building import HERE, write_card, write_checksums, write_gzip

SOURCE = Path("/usr/share/datasets/fashion-mnist")
COPYRIGHT = Path("/usr/share/doc/dataset-fashion-mnist/copyright")
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
PER_CLASS = {"train": 2000, "t10k": 400}

CARD = """# Fashion-MNIST, a cut of 24,000 images

Photographs of articles of clothing from the shop Zalando, grey, 28 x 28 pixels, one article an image.

| | |
|---|---|
| source | Fashion-MNIST: Xiao, Rasul, Vollgraf (2017), "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", arXiv:1708.07747, <https://github.com/zalandoresearch/fashion-mnist>; taken from the Debian package `dataset-fashion-mnist` |
| licence | MIT, copyright 2017 Zalando SE: see `LICENSE` |
| cut | the first {train_each:,} of each class from the 60,000 training images and the first {test_each:,} of each class from the 10,000 test images, in the original order |
| images | {train:,} train, {test:,} test, unsigned bytes, 0 is the background |
| statistics of the train split | mean {mean:.4f}, standard deviation {std:.4f} of the pixels divided by 255 |
| files | IDX, the format of MNIST, gzip: {size:.2f} MB (10^6 bytes) in all |
| built by | `data/build_fashion_mnist.py` |

## Classes

{classes}

## Caveats

- Accuracies on this cut are not those of the literature: it has a third of the training images and {test:,} of the
  10,000 test images.
- {distinct:,} of the {total:,} images are distinct, byte for byte. Near duplicates were not looked for.
- It is a small grey set for learning techniques on a laptop. It says little about how a model fares on
  photographs at large.
"""  # noqa: E501 (rows of a Markdown table)


def read(name: str, offset: int, source: Path = SOURCE) -> npt.NDArray[np.uint8]:
    """The bytes of one IDX file after its header of `offset` bytes."""
    return np.frombuffer(gzip.decompress((source / name).read_bytes()), np.uint8, offset=offset)


def cut(labels: npt.NDArray[np.uint8], per_class: int) -> npt.NDArray[np.int64]:
    """Where the first `per_class` samples of each class stand, in ascending order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in range(len(CLASSES))]))


def select(part: str, source: Path = SOURCE) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """The images [N, 28, 28] and labels [N] of the cut; `part` is "train" or "t10k"."""
    images = read(f"{part}-images-idx3-ubyte.gz", 16, source).reshape(-1, 28, 28)
    labels = read(f"{part}-labels-idx1-ubyte.gz", 8, source)
    chosen = cut(labels, PER_CLASS[part])
    return images[chosen], labels[chosen]


def idx(array: npt.NDArray[np.uint8]) -> bytes:
    """An array of bytes in the IDX format: magic number (8 = unsigned byte, then the rank), sizes, values."""
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">i4")
    return header.tobytes() + array.tobytes()


def licence() -> str:
    """The MIT licence as the package's copyright file gives it, with the copyright line of the data."""
    text = COPYRIGHT.read_text(encoding="utf-8")
    owner = next(line for line in text.splitlines() if line.startswith("Copyright:"))
    body = text.rpartition("License: Expat\n")[2]
    lines = ["" if line.strip() == "." else line.strip() for line in body.splitlines()]
    return "MIT License (Expat)\n\n" + owner.replace("https:tech", "https://tech") + "\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not SOURCE.is_dir():
        raise SystemExit(f"{SOURCE} is missing: install the Debian package dataset-fashion-mnist.")
    target = HERE / "fashion-mnist"
    parts = {part: select(part) for part in PER_CLASS}
    for part, (images, labels) in parts.items():
        write_gzip(target / f"{part}-images-idx3-ubyte.gz", idx(images))
        write_gzip(target / f"{part}-labels-idx1-ubyte.gz", idx(labels))
    pixels = parts["train"][0] / 255.0
    card = CARD.format(
        train_each=PER_CLASS["train"],
        test_each=PER_CLASS["t10k"],
        train=len(parts["train"][1]),
        test=len(parts["t10k"][1]),
        mean=pixels.mean(),
        std=pixels.std(),
        total=sum(len(labels) for _, labels in parts.values()),
        distinct=len({image.tobytes() for images, _ in parts.values() for image in images}),
        size=sum(p.stat().st_size for p in target.glob("*.gz")) / 1e6,
        classes="\n".join(f"{i}. {name}" for i, name in enumerate(CLASSES)),
    )
    write_card(target / "CARD.md", card)
    (target / "LICENSE").write_text(licence(), encoding="utf-8")
    (target / "classes.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
    write_checksums()
    print(card)


if __name__ == "__main__":
    main()
