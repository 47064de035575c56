"""The data sets that come with the workbook: whole, as their cards say, and what the build scripts make."""

import csv
import gzip
import hashlib
import importlib
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets.mnist import read_image_file, read_label_file

from labkit.data.embedded import data_folder, embedded_file
from labkit.data.errors import DataError
from labkit.data.idx import read_idx
from labkit.data.tokens import PAD, SPECIAL, decode, encode, load_tokenizer, train_tokenizer

DATA = data_folder()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A build script of `data/`, imported by name."""
    monkeypatch.syspath_prepend(str(DATA))
    return importlib.import_module


def rows(split: str) -> list[list[str]]:
    with gzip.open(DATA / "wordnet-topics" / f"{split}.csv.gz", "rt", encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


# The folder


def test_every_data_file_has_its_checksum_in_the_list_and_matches_it() -> None:
    lines = (DATA / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    known = {".md", ".py", ""}  # cards, scripts, licences
    files = {p.relative_to(DATA).as_posix(): p for p in DATA.glob("*/*") if p.parent.name != "__pycache__"}
    assert listed.keys() == {name for name, path in files.items() if path.suffix not in known}
    for name, digest in listed.items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == digest, name


def test_each_set_has_a_card_and_the_licence_that_goes_with_every_copy() -> None:
    assert "Permission is hereby granted, free of charge" in (DATA / "fashion-mnist/LICENSE").read_text()
    assert "2017, Zalando SE" in (DATA / "fashion-mnist/LICENSE").read_text()
    licence = (DATA / "wordnet-topics/LICENSE").read_text()
    assert licence.startswith("This software and database is being provided to you, the LICENSEE")
    assert "WordNet 3.0 Copyright 2006 by Princeton University." in licence
    for name in ("fashion-mnist", "wordnet-topics"):
        card = (DATA / name / "CARD.md").read_text()
        assert all(heading in card for heading in ("| source |", "| licence |", "## Caveats", "## Baselines"))


def test_the_folder_is_the_one_that_labkit_data_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a.txt").touch()
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path))
    assert embedded_file("toy", "a.txt") == tmp_path / "toy" / "a.txt"


def test_a_missing_folder_and_a_missing_file_are_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path))
    with pytest.raises(
        DataError, match=r"The embedded set toy lacks .*a\.txt: restore it with git, or set LABKIT_DATA"
    ):
        embedded_file("toy", "a.txt")
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(
        DataError, match=r"nowhere, is missing: set LABKIT_DATA to the data/ folder .* pip install -e\.$"
    ):
        data_folder()


def test_the_same_content_compresses_to_the_same_bytes_at_any_time_under_any_name(script: Any, tmp_path: Path) -> None:
    building = script("building")
    building.write_gzip(tmp_path / "a.gz", b"content" * 100)
    building.write_gzip(tmp_path / "b.gz", b"content" * 100)
    packed = (tmp_path / "a.gz").read_bytes()
    assert packed == (tmp_path / "b.gz").read_bytes()
    assert packed[4:8] == bytes(4)  # no time in the header
    assert gzip.decompress(packed) == b"content" * 100


def test_a_rebuilt_card_keeps_its_measured_baselines(script: Any, tmp_path: Path) -> None:
    building = script("building")
    building.write_card(tmp_path / "CARD.md", "# Old")
    building.write_baselines(tmp_path / "CARD.md", "87 %")
    building.write_card(tmp_path / "CARD.md", "# New")
    assert (tmp_path / "CARD.md").read_text() == "# New\n\n## Baselines\n\n87 %\n"
    building.write_baselines(tmp_path / "CARD.md", "88 %")
    assert (tmp_path / "CARD.md").read_text() == "# New\n\n## Baselines\n\n88 %\n"


# Fashion-MNIST


def test_fashion_mnist_has_2000_train_and_400_test_images_of_each_class() -> None:
    for part, each in (("train", 2000), ("t10k", 400)):
        labels = read_idx(DATA / "fashion-mnist" / f"{part}-labels-idx1-ubyte.gz")
        images = read_idx(DATA / "fashion-mnist" / f"{part}-images-idx3-ubyte.gz")
        assert torch.bincount(labels).tolist() == [each] * 10
        assert images.shape == (10 * each, 28, 28)


def test_torchvision_reads_the_files_and_finds_the_same(tmp_path: Path) -> None:
    for name, read in (("t10k-images-idx3-ubyte", read_image_file), ("t10k-labels-idx1-ubyte", read_label_file)):
        packed = DATA / "fashion-mnist" / f"{name}.gz"
        (tmp_path / name).write_bytes(gzip.decompress(packed.read_bytes()))
        assert torch.equal(read(str(tmp_path / name)), read_idx(packed).to(read(str(tmp_path / name)).dtype))


def test_fashion_mnist_is_what_the_script_cuts_from_the_debian_package(script: Any) -> None:
    build = script("build_fashion_mnist")
    if not build.SOURCE.is_dir():
        pytest.skip("The Debian package dataset-fashion-mnist is not installed.")
    images, labels = build.select("t10k")
    assert np.array_equal(images, read_idx(DATA / "fashion-mnist/t10k-images-idx3-ubyte.gz").numpy())
    assert np.array_equal(labels, read_idx(DATA / "fashion-mnist/t10k-labels-idx1-ubyte.gz").numpy())
    whole = build.read("train-labels-idx1-ubyte.gz", 8)
    assert np.array_equal(whole[build.cut(whole, 2000)], read_idx(DATA / "fashion-mnist/train-labels-idx1-ubyte.gz"))


def test_a_damaged_or_foreign_idx_file_is_told_in_a_sentence(tmp_path: Path) -> None:
    good = (DATA / "fashion-mnist/t10k-labels-idx1-ubyte.gz").read_bytes()
    path = tmp_path / "labels.gz"
    for content in (good[:500], good[:60] + b"\xff" * 40 + good[100:], b"no gzip"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"labels\.gz is damaged .*: restore it\.$"):
            read_idx(path)
    for content in (b"", b"\0\0\x0b\x01" + bytes(8), b"\0\0\x08\x01\0\0\0\x05four"):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(DataError, match=r"labels\.gz is not an IDX file of unsigned bytes: restore it\.$"):
            read_idx(path)


# WordNet topics


def test_the_card_counts_the_documents_that_are_there() -> None:
    card = (DATA / "wordnet-topics/CARD.md").read_text()
    train, test = (Counter(topic for topic, _ in rows(split)) for split in ("train", "test"))
    assert sorted(train) == sorted((DATA / "wordnet-topics/classes.txt").read_text().split()) == sorted(test)
    for topic in train:
        row = re.search(rf"\| {topic} \|.*", card)
        assert row is not None
        read, short, offensive, classroom, duplicates, left, trained, tested = map(int, re.findall(r"\d+", row[0]))
        assert (trained, tested) == (train[topic], test[topic])
        assert left == read - short - offensive - classroom - duplicates
        assert trained + tested == min(left, 2500)
    assert f"{train.total() + test.total():,}: {train.total():,} train, {test.total():,} test" in card


def test_the_test_split_is_a_fifth_of_every_topic_and_no_definition_stands_twice() -> None:
    train, test = rows("train"), rows("test")
    for topic, count in Counter(topic for topic, _ in train + test).items():
        assert sum(row[0] == topic for row in test) == round(count / 5)
    definitions = [definition.lower() for _, definition in train + test]
    assert len(set(definitions)) == len(definitions)
    assert all(len(definition.split()) >= 4 and '"' not in definition for definition in definitions)


def test_the_topics_are_mixed_so_that_any_prefix_has_them_all() -> None:
    for split in ("train", "test"):
        counts = Counter(topic for topic, _ in rows(split)[:600])
        assert len(counts) == 12
        assert max(counts.values()) < 3 * min(counts.values())


def test_no_test_document_has_a_word_of_the_lists(script: Any) -> None:
    build = script("build_wordnet")
    for _, definition in rows("test"):
        assert not build.OFFENSIVE.search(definition), definition
        assert not build.CLASSROOM.search(definition), definition


def line(number: int, gloss: str, pointers: str = "000") -> str:
    return f"00000001 {number:02} n 01 word 0 {pointers} | {gloss}  "


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (line(5, "a small animal with fur"), None),
        (line(5, "a small animal"), "short or quoted"),
        (line(5, 'a small animal with fur; "she saw a small animal"'), None),
        (line(4, 'a stride (as in "make strides" and so on)'), "short or quoted"),
        (line(18, "an offensive word for a person"), "offensive"),
        (line(18, 'one of many people; "said as an insult to all"'), "offensive"),
        (line(18, "one of the people of somewhere", "001 ;u 06718862 n 0000"), "offensive"),
        (line(18, "one of the people of somewhere", "001 @ 06718862 n 0000"), None),
        (line(5, "a large inoffensive animal of Asia"), None),
        (line(18, "someone who commits a murder or two"), "classroom"),
        (line(20, "a plant similar to Phaseolus vulgaris"), None),
    ],
)
def test_what_is_short_quoted_offensive_or_not_for_a_classroom_is_dropped(
    script: Any, text: str, reason: str | None
) -> None:
    build = script("build_wordnet")
    sense = build.parse(text)
    assert build.why_dropped(sense) == reason


def test_a_definition_ends_where_its_examples_begin_and_other_topics_are_passed_over(script: Any) -> None:
    build = script("build_wordnet")
    assert (
        build.parse(line(9, 'a way to think; or not; "she thought"; "he too"')).definition == "a way to think; or not"
    )
    assert build.parse(line(9, 'a way to think: "she thought"')).definition == "a way to think"
    assert build.parse(line(28, "a very long time indeed")) is None


def test_duplicates_in_a_topic_are_kept_once_and_those_of_two_topics_not_at_all(script: Any) -> None:
    build = script("build_wordnet")
    lines = [
        line(5, "an animal that eats grass"),
        line(5, "An animal that eats grass"),
        line(5, "one species of the lot"),
        line(20, "one species of the lot"),
    ]
    splits, counts = build.build(lines)
    assert splits["train"] + splits["test"] == [("animal", "an animal that eats grass")]
    assert (counts["animal"]["duplicate"], counts["plant"]["duplicate"]) == (2, 1)


def test_wordnet_topics_is_what_the_script_cuts_from_the_debian_package(script: Any) -> None:
    build = script("build_wordnet")
    if not build.SOURCE.is_file():
        pytest.skip("The Debian package wordnet-base is not installed.")
    lines = build.SOURCE.read_text(encoding="utf-8").splitlines()
    few = [text for text in lines if text[9:11] in ("08", "27")]  # body and substance, which share no definition
    splits, _ = build.build(few)
    for name, cut in splits.items():
        assert [list(row) for row in cut] == [row for row in rows(name) if row[0] in ("body", "substance")]
    assert build.licence(lines) == (DATA / "wordnet-topics/LICENSE").read_text()


def test_the_csv_files_are_the_rows_written_with_line_feeds(script: Any) -> None:
    packed = gzip.decompress((DATA / "wordnet-topics/test.csv.gz").read_bytes())
    assert script("build_wordnet").as_csv(rows("test")) == packed
    assert b"\r" not in packed


# The tokenizer


def test_the_tokenizer_is_the_one_trained_on_the_train_split(script: Any) -> None:
    build = script("build_tokenizer")
    trained = train_tokenizer([definition for _, definition in rows("train")], vocab_size=build.VOCAB_SIZE)
    assert trained.to_str() == load_tokenizer().to_str()
    assert trained.get_vocab_size() == 4096


@pytest.mark.parametrize("text", ["a small animal", "", "  two  spaces\n", "naïve 東京 🙂", "\0\x01", "<pad> <eos>"])
def test_any_text_decodes_to_itself_and_holds_no_special_token(text: str) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert all(id >= len(SPECIAL) for id in ids)
    assert decode([2, *ids, 3, PAD, PAD]) == text


def test_common_words_are_one_token() -> None:
    assert [len(encode(f" {word}")) for word in ("animal", "person", "small", "United")] == [1, 1, 1, 1]


def test_what_is_no_tokenizer_of_ours_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no tokenizer at .*nowhere\.json: give the path"):
        load_tokenizer(tmp_path / "nowhere.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match=r"other\.json is not a tokenizer of the `tokenizers` library"):
        load_tokenizer(tmp_path / "other.json")
    mine = load_tokenizer().to_str()
    (tmp_path / "named.json").write_text(io.StringIO(mine).read().replace("<pad>", "[PAD]"))
    with pytest.raises(DataError, match=r"named\.json must give ids 0 to 3 to <pad>, <unk>, <bos>, <eos>"):
        load_tokenizer(tmp_path / "named.json")
    with pytest.raises(ValueError, match=r"vocab_size must be at least 260 .* not 259\.$"):
        train_tokenizer(["text"], vocab_size=259)
