"""A text set as one stream of tokens, cut into blocks: what a causal model learns to continue."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from labkit.data.text_sets import read_text
from labkit.data.tokens import BOS, EOS, PAD, load_tokenizer

IGNORE = -100  # the target that F.cross_entropy leaves out by default (ignore_index)


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """A stream of tokens in blocks of `block_len`: inputs [T], and as targets [T] the same one token later.

    The stream is `<bos>`, then each document followed by `<eos>`. Every token but the leading `<bos>` is a target
    exactly once. The last block is filled up with `pad_id` as input and -100 as target.
    """

    def __init__(self, texts: Iterable[str], *, block_len: int = 64, tokenizer: Tokenizer | None = None) -> None:
        if block_len < 1:
            raise ValueError(f"block_len must be at least 1 token, not {block_len}.")
        tokenizer = tokenizer or load_tokenizer()
        stream = [BOS]
        for document in texts:
            stream += tokenizer.encode(document).ids
            stream.append(EOS)
        self.stream = torch.tensor(stream, dtype=torch.int64)
        self.block_len, self.vocab_size, self.pad_id = block_len, tokenizer.get_vocab_size(), PAD
        targets = len(stream) - 1
        blocks = -(-targets // block_len)
        self._inputs = torch.full((blocks * block_len,), PAD)
        self._targets = torch.full((blocks * block_len,), IGNORE)
        self._inputs[:targets], self._targets[:targets] = self.stream[:-1], self.stream[1:]
        self._inputs, self._targets = self._inputs.view(-1, block_len), self._targets.view(-1, block_len)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs [T] and targets [T] of one block."""
        return self._inputs[index], self._targets[index]

    def set_epoch(self, epoch: int) -> None:
        """Nothing here depends on the epoch; image sets have the same method."""

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [B, T] and targets [B, T]."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return self._inputs[chosen], self._targets[chosen]


def token_stream(
    name: str | Path = "wordnet-topics",
    split: str = "train",
    *,
    block_len: int = 64,
    folder: str | Path | None = None,
    limit: int | None = None,
    header: bool = False,
    tokenizer: Tokenizer | None = None,
) -> TokenBlocks:
    """The documents of a text set, in their order, as one stream in blocks of `block_len` tokens.

    The other arguments and the errors are those of `text`; `limit` counts documents.
    """
    found = read_text(name, split, folder=folder, limit=limit, header=header)
    return TokenBlocks(found.texts, block_len=block_len, tokenizer=tokenizer)
