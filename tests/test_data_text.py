"""Text sets: as tokens with padding, as one stream in blocks, and read from each layout as it is published."""

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from labkit.data.errors import DataError
from labkit.data.text_layouts import read_csv, read_csv_folder
from labkit.data.text_sets import TextSet, read_text, text
from labkit.data.token_blocks import IGNORE, TokenBlocks, token_stream
from labkit.data.tokens import BOS, EOS, PAD, decode, encode, load_tokenizer, train_tokenizer

TEXTS = ["a small animal", "", "a very large plant of the tropics"]


def toy(**settings: Any) -> TextSet:
    return TextSet(TEXTS, [1, 0, 1], classes=["plant", "animal"], **settings)


# The embedded set


def test_the_default_set_is_definitions_of_twelve_topics() -> None:
    train, test = text(limit=600), text(split="test", limit=600)
    assert train.classes == test.classes
    assert train.classes[:3] == ("act", "animal", "artifact") and len(train.classes) == 12
    assert train.vocab_size == 4096 == load_tokenizer().get_vocab_size()
    assert set(train.labels.tolist()) == set(range(12))
    found = read_text("wordnet-topics", "train", limit=600)
    assert decode(train[0][0].tolist()) == found.texts[0]
    assert len(read_text("wordnet-topics", "train").texts) > 4 * len(read_text("wordnet-topics", "test").texts) - 10


# Tokens and batches


def test_a_document_is_bos_and_its_tokens_and_an_empty_one_is_bos_alone() -> None:
    documents = toy()
    for i, document in enumerate(TEXTS):
        tokens, label = documents[i]
        assert tokens.tolist() == [BOS, *encode(document)]
        assert label == [1, 0, 1][i]


def test_a_batch_is_padded_to_its_longest_document_or_as_told() -> None:
    documents = toy()
    tokens, labels = documents.batch([2, 0])
    assert (tokens.dtype, labels.tolist()) == (torch.int64, [1, 1])
    assert tokens.shape == (2, len(documents[2][0]))
    assert torch.equal(tokens[0], documents[2][0])
    valid = tokens[1] != documents.pad_id
    assert torch.equal(tokens[1][valid], documents[0][0])
    assert valid.tolist() == sorted(valid.tolist(), reverse=True)  # padding is at the end
    wide, _ = documents.batch(torch.tensor([2, 0]), pad_to=40)
    assert wide.shape == (2, 40)
    assert torch.equal(wide[:, : tokens.shape[1]], tokens) and (wide[:, tokens.shape[1] :] == PAD).all()
    with pytest.raises(ValueError, match=r"pad_to=3 is shorter than a document of \d+ tokens in the batch\.$"):
        documents.batch([0, 2], pad_to=3)


def test_a_long_document_keeps_its_first_tokens() -> None:
    documents = toy(max_len=4)
    assert documents[2][0].tolist() == [BOS, *encode(TEXTS[2])[:3]]
    assert documents.batch([0, 1, 2])[0].shape[1] == 4


def test_a_data_loader_reads_them() -> None:
    loaded = list(DataLoader(toy(), batch_size=1))
    assert [tokens[0].tolist() for tokens, _ in loaded] == [toy()[i][0].tolist() for i in range(3)]


def test_another_tokenizer_is_used_where_given() -> None:
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=270)
    documents = toy(tokenizer=tokenizer)
    assert documents.vocab_size == 270
    assert documents[2][0].tolist() == [BOS, *tokenizer.encode(TEXTS[2]).ids]


# The token stream


def test_every_token_and_every_end_is_a_target_once_and_follows_its_input() -> None:
    for block_len in (1, 4, 5, 100):
        blocks = TokenBlocks(TEXTS, block_len=block_len)
        stream = [BOS]
        for document in TEXTS:
            stream += [*encode(document), EOS]
        inputs, targets = blocks.batch(range(len(blocks)))
        assert inputs.shape == targets.shape == (-(-(len(stream) - 1) // block_len), block_len)
        assert targets[targets != IGNORE].tolist() == stream[1:]
        assert inputs[targets != IGNORE].tolist() == stream[:-1]
        assert (inputs[targets == IGNORE] == PAD).all()
        assert (targets == IGNORE).sum() == targets.numel() - len(stream) + 1 < block_len
        assert torch.equal(blocks[len(blocks) - 1][0], inputs[-1]) and torch.equal(blocks[0][1], targets[0])


def test_minus_100_is_what_cross_entropy_leaves_out() -> None:
    blocks = TokenBlocks(TEXTS, block_len=16)
    inputs, targets = blocks.batch(range(len(blocks)))
    assert (targets == IGNORE).any()
    logits = torch.randn(*inputs.shape, 4096, generator=torch.Generator().manual_seed(0))
    valid = targets != IGNORE
    torch.testing.assert_close(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"),
        -logits.log_softmax(-1)[valid].gather(1, targets[valid][:, None]).sum(),
    )


def test_the_stream_of_a_set_holds_its_documents_in_their_order() -> None:
    blocks = token_stream(limit=20, block_len=32)
    documents = " ".join(read_text("wordnet-topics", "train", limit=20).texts)
    assert decode([token if token != EOS else encode(" ")[0] for token in blocks.stream.tolist()]).strip() == documents
    assert (blocks.stream == EOS).sum() == 20


# Layouts


@pytest.fixture(scope="module")
def ag_news(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AG News in its official layout: real rows where LABKIT_FIXTURES points to them."""
    real = Path(os.environ.get("LABKIT_FIXTURES", "nowhere")) / "ag_news"
    if real.is_dir():
        return real
    folder = tmp_path_factory.mktemp("ag_news")
    rows = [f'"{i % 4 + 1}","Title, {i}"," Description \\$5 of ""{i}""."\n' for i in range(40)]
    (folder / "train.csv").write_text("".join(rows), encoding="utf-8")
    (folder / "test.csv").write_text("".join(rows[:12]), encoding="utf-8")
    (folder / "classes.txt").write_text("World\nSports\nBusiness\nSci/Tech\n", encoding="utf-8")
    return folder


def test_ag_news_is_read_from_its_official_layout(ag_news: Path) -> None:
    for name in ("ag-news", "ag_news", "AG News"):
        found = read_text(name, "test", folder=ag_news)
        assert found.classes == ("World", "Sports", "Business", "Sci/Tech")
        assert set(found.labels) == {0, 1, 2, 3}
        assert not any("\\" in document or "  " in document for document in found.texts)
    first = (ag_news / "test.csv").read_text(encoding="utf-8").splitlines()[0].split('","')
    assert found.labels[0] == int(first[0].strip('"')) - 1
    assert found.texts[0].startswith(first[1])
    documents = text("ag-news", "train", folder=ag_news, limit=32)
    assert documents.batch(range(32))[0].shape[0] == 32


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def test_any_csv_of_label_and_text_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "all.csv", 'label,text\nspam,"win, now"\nham,see you\n\nspam,again\n')
    found = read_text(path, "train", header=True)
    assert found == (["win, now", "see you", "again"], [1, 0, 1], ("ham", "spam"))
    assert text(str(path), header=True).classes == ("ham", "spam")
    assert read_csv(write(tmp_path / "b.csv", "\ufeffspam,marked\n")).classes == ("spam",)  # a byte order mark
    assert read_csv(write(tmp_path / "n.csv", "10,a\n9,b\n2,c\n")).classes == ("2", "9", "10")  # as numbers


def test_a_test_file_takes_its_classes_from_classes_txt_or_from_the_train_file(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", "ant,a\nbee,b\ncat,c\n")
    with gzip.open(tmp_path / "test.csv.gz", "wt", encoding="utf-8") as file:
        file.write("cat,d\n")
    assert read_csv_folder(tmp_path, "test") == (["d"], [2], ("ant", "bee", "cat"))
    write(tmp_path / "classes.txt", "cat\nbee\nant\n")
    assert read_csv_folder(tmp_path, "test") == (["d"], [0], ("cat", "bee", "ant"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("1,a\n5,b\n", r"test\.csv, line 2: '5' is none of the 2 classes\.$"),
        ("1,a\nonly a label\n", r"test\.csv, line 2: a row needs a label and a text, separated by a comma\.$"),
        ("", r"The test split of .* has no documents: look into its files\.$"),
        ("1," + "x" * 200_000, r"test\.csv, line 1: field larger than field limit"),
    ],
)
def test_a_row_that_does_not_fit_is_named_by_file_and_line(tmp_path: Path, content: str, sentence: str) -> None:
    write(tmp_path / "classes.txt", "first\nsecond\n")
    write(tmp_path / "test.csv", content)
    with pytest.raises(DataError, match=sentence):
        text(tmp_path, "test")


def test_what_is_no_csv_in_utf_8_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"1,caf\xe9\n")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"1,text\n" * 99)[:-9])
    (tmp_path / "b.csv.gz").write_bytes(b"1,text\n")
    for name in ("a.csv", "a.csv.gz", "b.csv.gz"):
        with pytest.raises(DataError, match=rf"{name} can't be read as CSV in UTF-8 \("):
            text(tmp_path / name)


def test_imdb_is_read_from_its_folders_without_the_unlabelled_reviews(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"aclImdb/{split}/pos/0_9.txt", f"A good {split}.<br /><br />Really.")
        write(tmp_path / f"aclImdb/{split}/neg/0_2.txt", "A bad one.")
    write(tmp_path / "aclImdb/train/unsup/0_0.txt", "Unlabelled.")
    write(tmp_path / "aclImdb/train/urls_pos.txt", "http://")
    for folder in (tmp_path, tmp_path / "aclImdb"):
        found = read_text("imdb", "test", folder=folder)
        assert found == (["A bad one.", "A good test.  Really."], [0, 1], ("neg", "pos"))
        assert read_text("imdb", "train", folder=folder).labels == [0, 1]


def test_20_newsgroups_is_read_without_the_headers_that_name_the_group(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for group in ("sci.space", "alt.atheism"):
            path = tmp_path / f"20news-bydate-{split}/{group}/51060"
            path.parent.mkdir(parents=True)
            path.write_bytes(f"Newsgroups: {group}\nSubject: x\n\n".encode() + b"caf\xe9 in\n\nspace")
    found = read_text("20-newsgroups", "test", folder=tmp_path)
    assert found == (["café in\n\nspace"] * 2, [0, 1], ("alt.atheism", "sci.space"))


def test_any_set_of_a_folder_for_each_class_is_read_by_its_path(tmp_path: Path) -> None:
    write(tmp_path / "train/ant/a.txt", "a text")
    write(tmp_path / "train/bee/b.txt", "b text")
    write(tmp_path / "test/bee/c.txt", "c text")
    assert read_text(tmp_path, "test") == (["c text"], [1], ("ant", "bee"))
    (tmp_path / "test/bee/c.txt").unlink()
    with pytest.raises(DataError, match=r"test has no texts: it needs a folder for each class, with files \*\.txt\.$"):
        read_text(tmp_path, "test")


def test_a_few_of_a_folder_are_of_all_classes(tmp_path: Path) -> None:
    for label in ("ant", "bee", "cat"):
        for i in range(5):
            write(tmp_path / f"train/{label}/{i}.txt", f"{label} {i}")
    assert read_text(tmp_path, "train", limit=3).labels == [0, 1, 2]
    assert read_text(tmp_path, "train", limit=99).labels == [0] * 5 + [1] * 5 + [2] * 5


# What is asked for wrongly


@pytest.mark.parametrize(
    ("arguments", "settings", "sentence"),
    [
        (("wordnet-topics", "dev"), {}, r"split must be 'train' or 'test', not 'dev'\.$"),
        ((), {"limit": -1}, r"limit must be at least 1, not -1: it is how many samples to keep\.$"),
        ((), {"limit": 5, "max_len": 1}, r"max_len must be at least 2 tokens \(<bos> and one of the text\), not 1\.$"),
        (("worldnet-topics",), {}, r"no data set named 'worldnet-topics'; .* Did you mean 'wordnet-topics'\?$"),
        (("cifar-10",), {}, r"cifar-10 is a set of images: open it with labkit\.data\.images\.$"),
        (("ag-news",), {}, r"ag-news is not in .*; fetch it: labkit data fetch ag-news\.$"),
        (("ag-news",), {"folder": "EMPTY"}, r"has no train split: there is no train\.csv or train\.csv\.gz in it\.$"),
        (("imdb",), {"folder": "EMPTY"}, r"does not hold IMDB, as there is no train/pos in it: give the folder"),
    ],
)
def test_what_is_asked_for_wrongly_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[Any, ...],
    settings: dict[str, Any],
    sentence: str,
) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    settings = {name: tmp_path if value == "EMPTY" else value for name, value in settings.items()}
    with pytest.raises((ValueError, DataError), match=sentence):
        text(*arguments, **settings)


def test_numbers_that_do_not_match_are_told_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"There are 1 texts but 2 labels: each text needs one\.$"):
        TextSet(["a"], [0, 1], classes=["a", "b"])
    with pytest.raises(ValueError, match=r"block_len must be at least 1 token, not 0\.$"):
        TokenBlocks(TEXTS, block_len=0)
