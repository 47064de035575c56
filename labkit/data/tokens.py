"""The tokenizer: text to token ids and back, with the `tokenizers` library and the embedded vocabulary."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from labkit.data.embedded import embedded_file
from labkit.data.errors import DataError

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
PAD, UNK, BOS, EOS = range(len(SPECIAL))


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on `texts`; the same texts in the same order give the same vocabulary.

    Ids 0 to 3 are `<pad>`, `<unk>`, `<bos>`, `<eos>`; the 256 bytes follow, then the merges. Every text can be
    encoded, since every byte is a token, and decodes to itself; `<unk>` therefore never comes up and is there only
    for code that expects one.

    Source: Sennrich, Haddow, Birch (2016), "Neural Machine Translation of Rare Words with Subword Units",
    arXiv:1508.07909, algorithm 1.
    """
    smallest = len(SPECIAL) + 256
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest} (4 special tokens and 256 bytes), not {vocab_size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: str | Path | None = None) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`; without a path the embedded one, with 4,096 tokens.

    Raises `DataError` where the file is missing, isn't a tokenizer or has
    other special tokens than ours.
    """
    file = embedded_file("wordnet-topics", "tokenizer.json") if path is None else Path(path)
    if not file.is_file():
        raise DataError(f"There is no tokenizer at {file}: give the path of a tokenizer.json.")
    return _read(file)


@lru_cache(maxsize=4)
def _read(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever it can't parse
        raise DataError(f"{file} is not a tokenizer of the `tokenizers` library ({error}).") from None
    if [tokenizer.token_to_id(token) for token in SPECIAL] != list(range(len(SPECIAL))):
        raise DataError(f"{file} must give ids 0 to 3 to {', '.join(SPECIAL)}; train one with train_tokenizer.")
    tokenizer.encode_special_tokens = True  # a text that happens to contain "<pad>" must not become padding
    return tokenizer


def encode(text: str, *, tokenizer: Tokenizer | None = None) -> list[int]:
    """The token ids of a text, without special tokens."""
    return list((tokenizer or load_tokenizer()).encode(text).ids)


def decode(ids: Sequence[int], *, tokenizer: Tokenizer | None = None) -> str:
    """The text of token ids; special tokens are left out."""
    return str((tokenizer or load_tokenizer()).decode(list(ids), skip_special_tokens=True))
