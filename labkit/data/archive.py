"""Unpacking an archive that nobody vouches for: only plain files and folders, only below one folder, only so much.

Nothing is left to the archive: no member decides on a link, a device, an owner, a permission bit, or a place outside.
"""

import gzip
import hashlib
import io
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

from labkit.data.errors import DataError

_CHUNK = 1024**2
_MOST_MEMBERS = 1_000_000


def extract(archive: Path, folder: Path, *, limit: int) -> dict[str, str]:
    """Unpack a tar, tar.gz or zip file into `folder`, which is made; the SHA-256 of each file, by its path within.

    `limit` bounds the bytes of all files together. Raises `DataError` for an archive that is truncated or damaged, that
    holds anything but files and folders, or whose members would lie outside of `folder`; what was unpacked by then
    stays in `folder`, so unpack into a temporary one.
    """
    digests: dict[str, str] = {}
    left = limit
    try:
        with archive.open("rb") as file:
            members = _zip_members(file) if file.read(4) == b"PK\x03\x04" else _tar_members(file)
            for count, (name, content) in enumerate(members):
                if count >= _MOST_MEMBERS:
                    raise DataError(f"{archive.name} is refused: it holds more than {_MOST_MEMBERS:,} files.")
                path = folder / _inside(name, archive)
                if content is None:
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                left, digests[path.relative_to(folder).as_posix()] = _copy(content, path, left)
                if left < 0:
                    raise DataError(f"{archive.name} is refused: it unpacks to more than {limit:,} bytes.")
    except _RefusedError as error:
        raise DataError(f"{archive.name} is refused: {error}.") from None
    except (EOFError, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DataError(
            f"{archive.name} is truncated or damaged ({str(error) or type(error).__name__}); "
            f"delete {archive} and fetch it again."
        ) from None
    if not digests:
        raise DataError(f"{archive.name} is refused: it holds no files.")
    return digests


class _RefusedError(Exception):
    """A member that no data set needs."""


def _tar_members(file: IO[bytes]) -> Iterator[tuple[str, IO[bytes] | None]]:
    with _plain_tar(file) as plain:
        with tarfile.open(fileobj=plain, mode="r|") as tar:
            for member in tar:
                if member.isdir():
                    yield member.name, None
                elif member.isreg() and not member.issparse():
                    content = tar.extractfile(member)
                    assert content is not None  # it is one for every regular file
                    yield member.name, content
                else:
                    raise _RefusedError(
                        f"its member {member.name!r} is neither a file nor a folder (a link, or a device)"
                    )
        while plain.read(_CHUNK):  # to the end, where gzip keeps its checksum
            pass


@contextmanager
def _plain_tar(file: IO[bytes]) -> Iterator[IO[bytes]]:
    file.seek(0)
    if file.read(2) == b"\x1f\x8b":
        file.seek(0)
        with io.BufferedReader(gzip.GzipFile(fileobj=file, mode="rb")) as plain:
            yield plain
        return
    file.seek(0, 2)
    if file.tell() < 1024 or file.seek(-1024, 2) < 0 or any(file.read(1024)):  # a tar ends in two empty blocks
        raise tarfile.ReadError("it does not end as a tar file does")
    file.seek(0)
    yield file


def _zip_members(file: IO[bytes]) -> Iterator[tuple[str, IO[bytes] | None]]:
    with zipfile.ZipFile(file) as packed:
        for member in packed.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if member.is_dir():
                yield member.filename, None
            elif kind not in (0, stat.S_IFREG) or member.flag_bits & 1:
                raise _RefusedError(f"its member {member.filename!r} is no plain file (a link, a device, or encrypted)")
            else:
                with packed.open(member) as content:
                    yield member.filename, content


def _inside(name: str, archive: Path) -> PurePosixPath:
    path, elsewhere = PurePosixPath(name), PureWindowsPath(name)  # whose root covers that of the former
    if elsewhere.drive or elsewhere.root or ".." in path.parts or ".." in elsewhere.parts:
        raise DataError(f"{archive.name} is refused: its member {name!r} would lie outside of the folder.")
    if not name.isprintable() or "\\" in name:
        raise DataError(f"{archive.name} is refused: its member {name!r} bears a name that not every system can keep.")
    return path


def _copy(content: IO[bytes], path: Path, left: int) -> tuple[int, str]:
    """Copy into `path` until more than `left` bytes came; how many are left (below 0: too many), and the digest."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        while left >= 0 and (chunk := content.read(_CHUNK)):
            left -= len(chunk)
            digest.update(chunk)
            out.write(chunk)
    return left, digest.hexdigest()
