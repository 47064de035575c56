"""Archives that nobody should unpack, and those that one should."""

import gzip
import hashlib
import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from labkit.data.archive import extract
from labkit.data.errors import DataError

FILES = {"set/train/a.txt": b"one" * 1000, "set/val/b.txt": b"two", "set/empty.txt": b""}


def tar(members: "list[tuple[tarfile.TarInfo, bytes]]", mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as packed:
        for member, content in members:
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def good_tar(mode: str = "w:gz") -> bytes:
    return tar([(tarfile.TarInfo(name), content) for name, content in FILES.items()], mode)


def good_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.mkdir("set")
        for name, content in FILES.items():
            packed.writestr(name, content)
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def zip_of(member: zipfile.ZipInfo, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr(member, content)
    return buffer.getvalue()


def zip_link() -> bytes:
    member = zipfile.ZipInfo("set/link")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return zip_of(member, b"/etc")


def refusal(content: bytes, tmp_path: Path, limit: int = 10**6) -> str:
    """The sentence with which it is refused; nothing may have come to lie outside of the folder, or be a link."""
    archive, folder = tmp_path / "set.archive", tmp_path / "below" / "folder"
    folder.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(content)
    with pytest.raises(DataError) as error:
        extract(archive, folder, limit=limit)
    outside = [
        path for path in tmp_path.rglob("*") if path not in (archive, folder.parent) and folder not in path.parents
    ]
    assert outside == [folder]
    assert all(path.is_dir() or (path.is_file() and not path.is_symlink()) for path in folder.rglob("*"))
    assert "\n" not in str(error.value) and "set.archive" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("content", [good_tar(), good_tar("w:"), good_zip()], ids=["tar.gz", "tar", "zip"])
def test_files_come_out_as_they_went_in_with_their_checksums(content, tmp_path):
    archive = tmp_path / "set.archive"
    archive.write_bytes(content)
    digests = extract(archive, tmp_path / "out", limit=10**6)
    assert digests == {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    assert {name: (tmp_path / "out" / name).read_bytes() for name in digests} == FILES


@pytest.mark.parametrize(
    "name",
    ["../evil.txt", "set/../../evil.txt", "/evil.txt", "C:/evil.txt", "C:evil.txt", "..\\evil.txt", "\\evil.txt"],
)
def test_a_member_that_would_lie_outside_is_refused(name, tmp_path):
    assert "would lie outside" in refusal(tar([(tarfile.TarInfo(name), b"x")]), tmp_path)
    assert "would lie outside" in refusal(zip_of(zipfile.ZipInfo(name), b"x"), tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "a\\b", "a\x1bb"])
def test_a_name_that_not_every_system_can_keep_is_refused(name, tmp_path):
    assert "not every system can keep" in refusal(tar([(tarfile.TarInfo(name), b"x")]), tmp_path)


@pytest.mark.parametrize(
    "member",
    [
        special("set/link", tarfile.SYMTYPE, "/etc"),
        special("set/link", tarfile.SYMTYPE, "train"),
        special("set/hard", tarfile.LNKTYPE, "../../secret"),
        special("set/pipe", tarfile.FIFOTYPE),
        special("set/null", tarfile.CHRTYPE),
        special("set/disk", tarfile.BLKTYPE),
    ],
    ids=["absolute link", "inner link", "hard link", "pipe", "character device", "block device"],
)
def test_links_and_devices_are_refused(member, tmp_path):
    assert "neither a file nor a folder" in refusal(tar([(member, b"")]), tmp_path)


def test_a_file_written_through_a_link_is_refused(tmp_path):
    members = [(special("set", tarfile.SYMTYPE, str(tmp_path)), b""), (tarfile.TarInfo("set/evil.txt"), b"x")]
    assert "neither a file nor a folder" in refusal(tar(members), tmp_path)


def test_a_link_in_a_zip_is_refused(tmp_path):
    assert "no plain file" in refusal(zip_link(), tmp_path)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("content", [good_tar(), good_zip()], ids=["tar.gz", "zip"])
def test_a_truncated_archive_is_refused(content, share, tmp_path):
    assert "truncated or damaged" in refusal(content[: int(len(content) * share)], tmp_path)


def test_an_archive_that_lacks_only_its_checksum_is_refused(tmp_path):
    assert "truncated or damaged" in refusal(good_tar()[:-8], tmp_path)


def test_it_is_refused_even_where_the_end_of_the_tar_comes_long_before_the_end_of_the_file(tmp_path):
    padded = gzip.compress(good_tar("w:") + bytes(100_000))
    assert "truncated or damaged" in refusal(padded[:-8], tmp_path)


def test_an_archive_whose_checksum_differs_is_refused(tmp_path):
    content = bytearray(good_tar())
    content[-8] ^= 1
    assert "truncated or damaged" in refusal(bytes(content), tmp_path)


def test_a_tar_cut_between_two_members_is_refused(tmp_path):
    content = good_tar("w:")[: 512 + 3072]  # the first header and its file, a whole number of blocks
    assert "does not end as a tar file does" in refusal(content, tmp_path)


def test_a_web_page_is_no_archive(tmp_path):
    assert "truncated or damaged" in refusal(b"<html>Please log in</html>", tmp_path)


def test_an_empty_archive_is_refused(tmp_path):
    assert "holds no files" in refusal(tar([]), tmp_path)


@pytest.mark.parametrize("packed", ["tar", "zip"])
def test_an_archive_that_explodes_is_stopped_at_the_limit(packed, tmp_path):
    zeros = bytes(5_000_000)
    member = zipfile.ZipInfo("zeros")
    member.compress_type = zipfile.ZIP_DEFLATED
    content = tar([(tarfile.TarInfo("zeros"), zeros)]) if packed == "tar" else zip_of(member, zeros)
    assert len(content) < 50_000
    assert "unpacks to more than 1,000,000 bytes" in refusal(content, tmp_path, limit=1_000_000)
    unpacked = sum(path.stat().st_size for path in (tmp_path / "below").rglob("zeros"))
    assert unpacked < 4_000_000


def test_many_small_files_count_together(tmp_path):
    members = [(tarfile.TarInfo(f"{number}.txt"), bytes(600)) for number in range(3)]
    assert "more than 1,500 bytes" in refusal(tar(members), tmp_path, limit=1500)


def test_the_owner_and_the_permission_bits_of_an_archive_do_not_matter(tmp_path):
    member = tarfile.TarInfo("a.txt")
    member.mode, member.uid = 0o4777, 12345
    (tmp_path / "set.archive").write_bytes(gzip.compress(tar([(member, b"x")], "w:")))
    extract(tmp_path / "set.archive", tmp_path / "out", limit=10)
    mode = (tmp_path / "out" / "a.txt").stat().st_mode
    assert not mode & (stat.S_ISUID | stat.S_IXUSR | stat.S_IWOTH)
