"""Labelled text as token ids, and `text`, which opens any text set by name or path."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from labkit.data.errors import DataError
from labkit.data.locating import check_request, locate, spread
from labkit.data.text_layouts import (
    Labelled,
    read_20newsgroups,
    read_csv,
    read_csv_folder,
    read_imdb,
    read_text_folder,
)
from labkit.data.tokens import BOS, PAD, load_tokenizer


class TextSet(Dataset[tuple[Tensor, Tensor]]):
    """Labelled documents as token ids: `<bos>`, then at most `max_len - 1` tokens of the text.

    The leading `<bos>` leaves an empty text with one valid token, over which a model can take its mean. Ids equal to
    `pad_id` are padding; all others are valid.
    """

    def __init__(
        self,
        texts: Sequence[str],
        labels: Sequence[int],
        *,
        classes: Sequence[str],
        max_len: int = 64,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if len(texts) != len(labels):
            raise ValueError(f"There are {len(texts)} texts but {len(labels)} labels: each text needs one.")
        if max_len < 2:
            raise ValueError(f"max_len must be at least 2 tokens (<bos> and one of the text), not {max_len}.")
        tokenizer = tokenizer or load_tokenizer()
        documents = [[BOS, *tokenizer.encode(text).ids[: max_len - 1]] for text in texts]
        lengths = torch.tensor([len(ids) for ids in documents], dtype=torch.int64)
        self._tokens = torch.tensor([token for ids in documents for token in ids], dtype=torch.int64)
        self._ends = lengths.cumsum(0)
        self._starts = self._ends - lengths
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.classes = tuple(classes)
        self.max_len, self.vocab_size, self.pad_id = max_len, tokenizer.get_vocab_size(), PAD

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The tokens [L] of one document, not padded, and its label, a scalar."""
        return self._tokens[self._starts[index] : self._ends[index]], self.labels[index]

    def set_epoch(self, epoch: int) -> None:
        """Nothing here depends on the epoch; image sets have the same method."""

    def batch(self, indices: Sequence[int] | Tensor, *, pad_to: int | None = None) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] and labels [B]; T is the longest document of the batch, or `pad_to`, where given.

        A fixed T serves pipelines, whose stages agree on shapes beforehand.
        """
        documents, labels = zip(*(self[int(index)] for index in indices), strict=True)
        tokens = pad_sequence(list(documents), batch_first=True, padding_value=PAD)
        if pad_to is not None:
            if pad_to < tokens.shape[1]:
                raise ValueError(
                    f"pad_to={pad_to} is shorter than a document of {tokens.shape[1]} tokens in the batch."
                )
            tokens = torch.nn.functional.pad(tokens, (0, pad_to - tokens.shape[1]), value=PAD)
        return tokens, torch.stack(labels)


def text(
    name: str | Path = "wordnet-topics",
    split: str = "train",
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    max_len: int = 64,
    header: bool = False,
    tokenizer: Tokenizer | None = None,
) -> TextSet:
    """Open a text set; `split` is "train" or "test".

    `name` is "wordnet-topics", which is embedded and the default; "ag-news", "imdb" or "20-newsgroups", which are
    fetched (`labkit data fetch`) or lie unpacked in `folder`; or the path of a folder with `train.csv` and `test.csv`,
    of a single CSV file (label first, then text; `header` skips a first line of column names), or of a folder with
    `<split>/<class>/*.txt`. `limit` keeps so many documents, `max_len` so many tokens of each.

    Raises `DataError` for data that can't be found or read, `ValueError` for other arguments, each in one sentence.
    """
    found = read_text(name, split, folder=folder, limit=limit, header=header)
    return TextSet(found.texts, found.labels, classes=found.classes, max_len=max_len, tokenizer=tokenizer)


def read_text(
    name: str | Path, split: str, *, folder: str | Path | None = None, limit: int | None = None, header: bool = False
) -> Labelled:
    """The texts themselves, before the tokenizer; arguments and errors as for `text`."""
    check_request(split, limit)
    known, place = locate(name, "text", folder)
    if known == "imdb":
        found = read_imdb(place, split)
    elif known == "20-newsgroups":
        found = read_20newsgroups(place, split)
    elif place.is_file():
        found = read_csv(place, header=header)
    elif (place / "train").is_dir():
        found = read_text_folder(place / "train", place / split, pattern="*.txt", encoding="utf-8")
    else:
        found = read_csv_folder(place, split, header=header)
    if not found.texts:
        raise DataError(f"The {split} split of {name} has no documents: look into its files.")
    chosen = spread(len(found.texts), limit)
    return Labelled([found.texts[i] for i in chosen], [found.labels[i] for i in chosen], found.classes)
