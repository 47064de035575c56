"""Labelled text as it lies on disk: CSV of label and text (AG News, the embedded set), IMDB, 20 Newsgroups.

Every reader gives texts, labels (int) and class names.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.data.errors import DataError
from labkit.data.locating import find_layout


class Labelled(NamedTuple):
    """Texts, the number of each one's class, and the names of the classes."""

    texts: list[str]
    labels: list[int]
    classes: tuple[str, ...]


def read_csv(path: Path, *, classes: Sequence[str] | None = None, header: bool = False) -> Labelled:
    """A CSV file, gzipped or not, whose first column is the label; the other columns, joined, are the text.

    A label is the name of a class or, as in AG News, its number from 1. Without `classes` they are the file's own
    labels, sorted. `header` skips the first line. Raises `DataError` with file and line where a row doesn't fit.
    """
    texts, names, lines = [], [], []
    for line, row in list(_rows(path))[1 if header else 0 :]:
        if not row:
            continue
        if len(row) < 2:
            raise DataError(f"{path}, line {line}: a row needs a label and a text, separated by a comma.")
        names.append(row[0].strip())
        texts.append(_one_line(row[1:]))
        lines.append(line)
    if classes is None:
        classes = sorted(set(names), key=_numbers_first)
    numbers = {str(number): number - 1 for number in range(1, len(classes) + 1)}
    numbers |= {name: number for number, name in enumerate(classes)}  # a name wins over a number
    for name, line in zip(names, lines, strict=True):
        if name not in numbers:
            raise DataError(f"{path}, line {line}: {name!r} is none of the {len(classes)} classes.")
    return Labelled(texts, [numbers[name] for name in names], tuple(classes))


def _one_line(cells: Sequence[str]) -> str:
    """The cells as one text. AG News writes a line break as backslash and n, and escapes with a backslash."""
    return " ".join(" ".join(cells).replace("\\n", " ").replace("\\", " ").split())


def _numbers_first(name: str) -> tuple[bool, int, str]:
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file with the numbers of the lines they end on; `DataError` where it can't be read."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            try:
                for row in reader:
                    yield reader.line_num, row
            except csv.Error as error:
                raise DataError(f"{path}, line {reader.line_num}: {error}.") from None
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} can't be read as CSV in UTF-8 ({error}).") from None


def read_csv_folder(folder: Path, split: str, *, header: bool = False) -> Labelled:
    """`<split>.csv` or `<split>.csv.gz`; the classes from classes.txt or, without one, from the train file."""
    paths = [folder / f"{split}.csv{suffix}" for suffix in ("", ".gz")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise DataError(f"{folder} has no {split} split: there is no {split}.csv or {split}.csv.gz in it.")
    if (folder / "classes.txt").is_file():
        classes = [line.strip() for line in (folder / "classes.txt").read_text(encoding="utf-8").splitlines()]
        return read_csv(path, classes=[name for name in classes if name], header=header)
    if split == "train":
        return read_csv(path, header=header)
    return read_csv(path, classes=read_csv_folder(folder, "train", header=header).classes, header=header)


def read_text_folder(train: Path, part: Path, *, pattern: str, encoding: str) -> Labelled:
    """`<part>/<class>/<file>`; the classes are the folders of `train`, without IMDB's unlabelled `unsup`."""
    classes = tuple(sorted(path.name for path in train.iterdir() if path.is_dir() and path.name != "unsup"))
    texts, labels = [], []
    for number, name in enumerate(classes):
        for path in sorted((part / name).glob(pattern)):
            texts.append(path.read_text(encoding=encoding))
            labels.append(number)
    if not texts:
        raise DataError(f"{part} has no texts: it needs a folder for each class, with files {pattern}.")
    return Labelled(texts, labels, classes)


def read_imdb(place: Path, split: str) -> Labelled:
    """IMDB, Maas et al. (2011): `aclImdb/{train,test}/{neg,pos}/*.txt`; `<br />` becomes a space."""
    folder = find_layout(place, "train/pos", what="IMDB")
    found = read_text_folder(folder / "train", folder / split, pattern="*.txt", encoding="utf-8")
    return found._replace(texts=[text.replace("<br />", " ") for text in found.texts])


def read_20newsgroups(place: Path, split: str) -> Labelled:
    """20 Newsgroups sorted by date: `20news-bydate-{train,test}/<group>/<number>`.

    The header of each message, which names the group, is left out: everything up to the first empty line.
    """
    folder = find_layout(place, "20news-bydate-train", what="20 Newsgroups")
    found = read_text_folder(
        folder / "20news-bydate-train", folder / f"20news-bydate-{split}", pattern="[0-9]*", encoding="latin-1"
    )
    return found._replace(texts=[text.partition("\n\n")[2] for text in found.texts])
