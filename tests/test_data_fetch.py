"""A set is either whole or absent, and what stands in the way is told in a sentence."""

import errno
import hashlib
import os
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
from faulty_server import HASTY, NAME, have_part, sentence

from labkit.data import downloading, fetching
from labkit.data.errors import DataError
from labkit.data.fetching import fetch, path, verify
from labkit.data.registry import RegistryEntry, RemoteFile

pytest_plugins = ["faulty_server"]

# --- the good case


def test_a_set_is_fetched_once_and_then_found(server, entry, tmp_path, capsys):
    folder = fetch(entry, patience=HASTY)
    assert folder == tmp_path / "cache" / "mini" / "imagenette2-160"
    assert {path.name for path in folder.iterdir()} == {"train", "val"}
    assert all(path.stat().st_size for path in folder.rglob("*.JPEG"))
    shown = capsys.readouterr().err
    assert NAME in shown and "100%" in shown, "progress goes to the end"
    assert fetch(entry, patience=HASTY) == path(entry) == folder
    assert server.requests == [""], "the second call asks no server"
    assert not (tmp_path / "cache" / "downloads" / "mini").exists(), "the archive is not kept beside what it held"


def test_a_set_that_is_here_is_found_in_a_cache_that_can_not_be_written(entry, tmp_path):
    folder = fetch(entry, progress=False, patience=HASTY)
    shutil.rmtree(tmp_path / "cache" / "locks")
    (tmp_path / "cache" / "locks").write_text("no folder, so no lock can be made")
    assert fetch(entry, rank=0) == fetch(entry, rank=1) == folder


def test_quiet_means_quiet(server, entry, capsys):
    server.faults = ["503"]
    fetch(entry, progress=False, patience=HASTY)
    assert capsys.readouterr() == ("", "")


def test_every_file_can_be_verified_and_a_damaged_one_is_found(entry):
    folder = fetch(entry, progress=False, patience=HASTY)
    files = sorted(folder.rglob("*.JPEG"))
    assert verify(entry) == len(files)
    original = files[3].read_bytes()
    files[3].write_bytes(bytes([original[0] ^ 1]) + original[1:])
    with pytest.raises(DataError, match=f"{files[3].name} is damaged"):
        verify(entry)
    files[3].unlink()
    with pytest.raises(DataError, match=f"{files[3].name} is missing"):
        verify(entry)
    files[3].write_bytes(original)
    extra = files[3].with_name("cat.JPEG")
    extra.write_bytes(b"")
    with pytest.raises(DataError, match=r"cat.JPEG is not part of the set"):
        verify(entry)


def test_a_set_of_several_plain_files_is_fetched(server, tmp_path):
    server.content = b'"3","Title","Text"\n'
    files = tuple(
        RemoteFile(f"{server.url}/{name}", "md5:" + hashlib.md5(server.content).hexdigest())
        for name in ("train.csv", "test.csv")
    )
    news = RegistryEntry(name="news", kind="text", title="", licence="", source="", files=files, archive=False)
    folder = fetch(news, root=tmp_path / "elsewhere", progress=False, patience=HASTY)
    assert folder == tmp_path / "elsewhere" / "news"
    assert (folder / "train.csv").read_bytes() == (folder / "test.csv").read_bytes() == server.content
    assert verify(news, root=tmp_path / "elsewhere") == 2


def test_a_file_put_there_by_hand_is_used(server, entry, part, content):
    have_part(part.with_suffix(""), content)
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests == []


def test_a_wrong_file_put_there_by_hand_is_refused_and_left(server, entry, part, content):
    have_part(part.with_suffix(""), content[:-1])
    with pytest.raises(DataError) as error:
        fetch(entry, progress=False, patience=HASTY)
    assert f"{len(content) - 1:,} bytes instead of {len(content):,}" in sentence(error) and "Delete it" in str(
        error.value
    )
    assert part.with_suffix("").exists() and server.requests == []


def test_a_folder_that_is_no_complete_set_is_never_overwritten(server, entry, tmp_path):
    (tmp_path / "cache" / "mini").mkdir(parents=True)
    (tmp_path / "cache" / "mini" / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="not the complete set mini"):
        fetch(entry, progress=False, patience=HASTY)
    assert (tmp_path / "cache" / "mini" / "mine.txt").read_text() == "mine" and server.requests == []


# --- the wrong file


def test_a_wrong_hash_is_told_with_both_hashes_and_nothing_is_kept(server, entry, part, content):
    server.always = "other bytes"
    with pytest.raises(DataError) as error:
        fetch(entry, progress=False, patience=HASTY)
    served = hashlib.sha256(bytes(byte ^ 1 for byte in content[:1000]) + content[1000:]).hexdigest()
    assert served in sentence(error) and hashlib.sha256(content).hexdigest() in sentence(error)
    assert not part.exists() and not part.with_suffix("").exists()


def test_a_wrong_size_is_told_before_the_body_is_fetched(server, entry, part, content):
    server.always = "shorter"
    with pytest.raises(DataError) as error:
        fetch(entry, progress=False, patience=HASTY)
    assert f"{len(content) - 7:,} bytes instead of {len(content):,}" in sentence(error)
    assert server.requests == [""] and not part.exists()


def test_a_file_that_never_ends_is_not_taken(server, entry, part, monkeypatch):
    monkeypatch.setattr(downloading, "_UNPINNED_LIMIT", 100_000)
    server.always = "endless"
    with pytest.raises(DataError, match="it has more than 100,000 bytes"):
        fetch(replace(entry, files=(replace(entry.files[0], size=None),)), progress=False, patience=HASTY)
    assert not part.exists() and server.sent < 32 * 2**20


def test_a_truncated_archive_with_the_right_hash_is_refused_and_no_set_appears(server, entry, content, tmp_path):
    server.content = content[: len(content) // 2]
    pinned = replace(entry.files[0], size=None, digest="sha256:" + hashlib.sha256(server.content).hexdigest())
    with pytest.raises(DataError) as error:
        fetch(replace(entry, files=(pinned,)), progress=False, patience=HASTY)
    assert "truncated or damaged" in sentence(error)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["downloads", "locks"]


# --- the disk


def test_a_disk_that_becomes_full_ends_in_a_sentence_and_what_came_is_resumed(server, entry, part, monkeypatch):
    def full_after_a_while(out, chunk):
        if out.tell() > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        out.write(chunk)

    with monkeypatch.context() as patched:
        patched.setattr(downloading, "_write", full_after_a_while)
        with pytest.raises(DataError) as error:
            fetch(entry, progress=False, patience=HASTY)
    assert "disk became full" in sentence(error) and "LABKIT_CACHE" in str(error.value)
    kept = part.stat().st_size
    assert kept > 100_000
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests == ["", f"bytes={kept}-"]


def test_a_disk_that_is_too_full_is_noticed_before_anything_is_written(server, entry, part, content, monkeypatch):
    have_part(part, content[:5000])
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 10))
    with pytest.raises(DataError) as error:
        fetch(entry, progress=False, patience=HASTY)
    assert f"{len(content) - 5000:,} bytes are still to come, 10 are free" in sentence(error)
    assert part.read_bytes() == content[:5000]


def test_a_disk_that_becomes_full_while_unpacking_leaves_the_archive_and_no_set(server, entry, monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(fetching, "write_marker", full)
        with pytest.raises(DataError) as error:
            fetch(entry, progress=False, patience=HASTY)
    assert "could not be stored" in sentence(error) and "No space left" in str(error.value)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["downloads", "locks"]
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests == [""], "the archive was still there"


def test_what_a_killed_process_left_half_unpacked_is_cleared_away(entry, tmp_path):
    left = tmp_path / "cache" / ".mini.unpacking" / "imagenette2-160" / "train" / "n0" / "half.JPEG"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    folder = fetch(entry, progress=False, patience=HASTY)
    assert not list(folder.rglob("half.JPEG")) and not (tmp_path / "cache" / ".mini.unpacking").exists()


def test_a_cache_that_can_not_be_made_ends_in_a_sentence(entry, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"mini could not be stored in .*file"):
        fetch(entry, root=tmp_path / "file", progress=False)
