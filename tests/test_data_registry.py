"""The sets by name, and `labkit data`."""

import re

import pytest
from faulty_server import have_part, sentence

from labkit.data import fetching, registry
from labkit.data.commands import data_command
from labkit.data.errors import DataError
from labkit.data.fetching import path, status
from labkit.data.registry import REGISTRY, lookup

pytest_plugins = ["faulty_server"]


def test_an_unknown_name_is_answered_with_the_known_ones_and_the_nearest():
    with pytest.raises(DataError) as error:
        lookup("imagenete2-160")
    assert "Did you mean 'imagenette2-160'?" in sentence(error)
    assert all(name in str(error.value) for name in REGISTRY)
    with pytest.raises(DataError) as error:
        lookup("qqqq")
    assert "Did you mean" not in sentence(error)


def test_capitals_hyphens_and_underscores_do_not_matter():
    assert lookup("ag_news") is lookup("AG-News") is REGISTRY["ag-news"]
    assert lookup("CIFAR10") is REGISTRY["cifar-10"]


def test_every_fetched_file_is_pinned_by_a_checksum():
    lengths = {"sha256": 64, "md5": 32}
    fetched = [file for entry in REGISTRY.values() for file in entry.files]
    assert len(fetched) == 8
    for file in fetched:
        algorithm, _, digest = file.digest.partition(":")
        assert re.fullmatch(f"[0-9a-f]{{{lengths[algorithm]}}}", digest), file.url
    assert all(entry.licence and entry.source and entry.title for entry in REGISTRY.values())
    assert [file.name for file in REGISTRY["ag-news"].files] == ["train.csv", "test.csv"]


@pytest.fixture
def known(entry, monkeypatch):
    entries = {"fashion-mnist": REGISTRY["fashion-mnist"], "mini": entry}
    monkeypatch.setattr(registry, "REGISTRY", entries)
    monkeypatch.setattr(fetching, "REGISTRY", entries)


def test_the_command_fetches_lists_verifies_and_finds(known, entry, part, content, capsys):
    assert data_command(["path", "mini"]) == 1
    assert "labkit data fetch mini" in capsys.readouterr().err
    assert data_command(["fetch", "mini", "--quiet"]) == 0
    assert data_command(["path", "mini"]) == 0
    assert capsys.readouterr() == (f"{path(entry)}\n" * 2, "")
    assert data_command(["list"]) == 0
    listed = capsys.readouterr().out
    assert re.search(rf"mini +image +{len(content) / 1e6:.1f} +complete", listed)
    assert re.search(r"fashion-mnist +image +embedded", listed)
    assert data_command(["verify"]) == 0
    assert re.search(r"fashion-mnist: \d+ files.*\nmini: [\d,]+ files", capsys.readouterr().out)
    next(path(entry).rglob("*.JPEG")).unlink()
    assert data_command(["verify", "mini"]) == 1
    assert "is missing" in capsys.readouterr().err


def test_the_command_shows_a_fetch_that_broke_off_as_partial(known, part, content):
    assert [found.state for found in status()] == ["embedded", "absent"]
    have_part(part, content[:100])
    assert [found.state for found in status()] == ["embedded", "partial"]


def test_the_command_ends_with_status_1_and_a_sentence(capsys):
    assert data_command(["fetch", "fashion-minst"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Did you mean 'fashion-mnist'?" in err
