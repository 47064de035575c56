"""Train the byte-level BPE vocabulary on the train split of the embedded text set: `python data/build_tokenizer.py`.

Byte pair encoding: Sennrich, Haddow, Birch (2016), arXiv:1508.07909; on bytes, as in GPT-2: Radford et al. (2019).
"""

import argparse
import csv
import gzip
from collections.abc import Sequence
from pathlib import Path

from building import HERE, write_checksums

from labkit.data.tokens import train_tokenizer

VOCAB_SIZE = 4096


def definitions(path: Path) -> list[str]:
    """The documents of one file, the second column."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [row[1] for row in csv.reader(file)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder = HERE / "wordnet-topics"
    if not (folder / "train.csv.gz").is_file():
        raise SystemExit(f"{folder / 'train.csv.gz'} is missing: run data/build_wordnet.py first.")
    train: Sequence[str] = definitions(folder / "train.csv.gz")
    tokenizer = train_tokenizer(train, vocab_size=VOCAB_SIZE)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_checksums()
    for split in ("train", "test"):
        texts = definitions(folder / f"{split}.csv.gz")
        lengths = sorted(len(tokenizer.encode(text).ids) for text in texts)
        words = sum(len(text.split()) for text in texts)
        print(
            f"{split}: {len(texts):,} documents, {sum(lengths):,} tokens, {sum(lengths) / words:.2f} a word; "
            f"median length {lengths[len(lengths) // 2]}, 99 % at most {lengths[int(0.99 * len(lengths))]}, "
            f"longest {lengths[-1]}"
        )


if __name__ == "__main__":
    main()
