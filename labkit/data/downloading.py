"""A download that ends well or in a sentence: resumed where it broke off, checked before it bears its name."""

import errno
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import requests
import urllib3
from tqdm.auto import tqdm

from labkit.data.errors import DataError
from labkit.data.registry import RemoteFile

_CHUNK = 64 * 1024
_PROGRESS = 1024**2  # an attempt that brings this many bytes is progress, so the count of failed attempts starts anew
_UNPINNED_LIMIT = 1024**3  # where no size is published: bytes after which the file can't be the one meant
_WORTH_RETRYING = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Patience:
    """How long to bear with a server: seconds to connect, seconds of silence, and how often to try again.

    Between attempts it waits `backoff` seconds, doubled each time, at most 30. A server that over `read` seconds sends
    less than `slowest` bytes a second counts as silent.
    """

    connect: float = 10.0
    read: float = 30.0
    attempts: int = 5
    backoff: float = 1.0
    slowest: float = 256.0


class _BrokenOffError(Exception):
    """An attempt failed in a way that another attempt may mend."""


def download(file: RemoteFile, target: Path, *, progress: bool = True, patience: Patience | None = None) -> None:
    """Fetch `file` into `target`, by way of `target` + ".part".

    A .part file that is there already is resumed, where the server can (RFC 9110, section 14); size and checksum
    decide whether the whole is right, and only then does it get its name. Proxies are those of the environment. One
    process at a time may do this for a target: `fetch` holds a lock.

    Raises `DataError` when the server refuses, stays silent, or has another file, and when the disk is full. The .part
    file is kept for the next attempt, unless its content was wrong.
    """
    patience = patience or Patience()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with (
        requests.Session() as session,
        tqdm(total=file.size, desc=file.name, unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        resumed = _receive(session, file, part, bar, patience)
        wrong = mismatch(part, file)
        if wrong and resumed:  # the pieces may come from different versions of the file: once more, in one piece
            part.unlink()
            _receive(session, file, part, bar, patience)
            wrong = mismatch(part, file)
    if wrong:
        part.unlink()
        raise DataError(f"{file.url} is not the file that labkit expects: {wrong}. What was fetched is removed.")
    with part.open("rb+") as written:
        os.fsync(written.fileno())
    part.replace(target)


def mismatch(path: Path, file: RemoteFile) -> str | None:
    """What is wrong with the file at `path`, measured by the pinned size and then the checksum; None if nothing is."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"it has {size:,} bytes instead of {file.size:,}"
    algorithm, _, expected = file.digest.partition(":")
    with path.open("rb") as content:
        actual = hashlib.file_digest(content, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    return None if actual == expected else f"its {algorithm} is {actual} instead of {expected}"


def _receive(
    session: requests.Session, file: RemoteFile, part: Path, bar: "tqdm[NoReturn]", patience: Patience
) -> bool:
    """Bring the .part file to its full length, in several attempts if need be; whether it came in pieces."""
    farthest = _length(part)
    pieces = farthest > 0
    failures = 0
    while file.size is None or _length(part) != file.size:
        try:
            _attempt(session, file, part, bar, patience)
            break
        except (_BrokenOffError, requests.RequestException, urllib3.exceptions.HTTPError) as error:
            cause = _cause(error)
        except OSError as error:
            raise _disk_error(error, part) from None
        length = _length(part)
        pieces = pieces or length > 0
        failures = 1 if length >= farthest + _PROGRESS else failures + 1
        farthest = max(farthest, length)
        if failures >= patience.attempts:
            kept = f" The {length:,} bytes that came are kept; fetch again to go on." if length else ""
            raise DataError(
                f"{file.url} could not be fetched in {failures} attempts: {cause}. Check the network and the proxy "
                f"settings, or put the file at {part.with_suffix('')} yourself.{kept}"
            )
        pause = min(30.0, patience.backoff * 2 ** (failures - 1))
        if not bar.disable:
            again = f"trying again in {pause:.0f} s ({failures + 1} of {patience.attempts})"
            bar.write(f"{file.name}: {cause}; {again}", file=sys.stderr)
        time.sleep(pause)
    return pieces


def _attempt(
    session: requests.Session, file: RemoteFile, part: Path, bar: "tqdm[NoReturn]", patience: Patience
) -> None:
    have = _length(part)
    # "identity": a compressed transfer could not be resumed, and the checksum is of the plain file
    headers = {"Accept-Encoding": "identity", "User-Agent": "labkit"} | ({"Range": f"bytes={have}-"} if have else {})
    waits = (patience.connect, patience.read)
    with session.get(file.url, headers=headers, stream=True, timeout=waits) as response:
        start, total = _span(response, file, have)
        if start is None:
            if total == have:
                return  # nothing is missing; the checksum decides
            part.unlink(missing_ok=True)
            raise _BrokenOffError("the server can't go on from where it broke off, so it starts over")
        if total is not None and file.size is not None and total != file.size:
            raise DataError(
                f"{file.url} is not the file that labkit expects: the server's has {total:,} bytes instead of "
                f"{file.size:,}. A proxy or a login page may stand in between."
            )
        whole = file.size if total is None else total
        limit = _UNPINNED_LIMIT if whole is None else whole
        if whole is not None:
            _require_space(part, whole - have)
        bar.total, bar.n, length = whole, start, start
        bar.refresh()
        with part.open("ab" if start else "wb") as out:
            for chunk in _chunks(response, patience):
                _write(out, chunk)
                bar.update(len(chunk))
                length += len(chunk)
                if length > limit:
                    break
    if length > limit:
        part.unlink()
        raise DataError(f"{file.url} is not the file that labkit expects: it has more than {limit:,} bytes.")
    if whole is not None and _length(part) < whole:
        raise _BrokenOffError(f"the connection closed after {_length(part):,} of {whole:,} bytes")


def _span(response: requests.Response, file: RemoteFile, have: int) -> tuple[int | None, int | None]:
    """Where the body starts (None: there is none of use) and how long the whole file is (None: not said)."""
    status, content_range = response.status_code, response.headers.get("Content-Range", "")
    if status == 200:  # a server that ignores Range answers so: from the start
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdigit() else None
    span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", content_range.strip())
    total = int(span[2]) if span and span[2] != "*" else None
    if status == 416:
        return None, total
    if status == 206:
        start = int(span[1]) if span and span[1] else None
        return (start, total) if start == have else (None, None)
    reason = f"the server answers {status} {response.reason}"
    if status in _WORTH_RETRYING:
        raise _BrokenOffError(reason)
    raise DataError(
        f"{file.url} could not be fetched: {reason}. Check the address, or the proxy that stands in between."
    )


def _chunks(response: requests.Response, patience: Patience) -> Iterator[bytes]:
    """The body as it arrives. A trickle counts as silence: it never trips the socket's timeout and never ends."""
    since, received = time.monotonic(), 0
    while chunk := response.raw.read1(_CHUNK, decode_content=False):
        yield chunk
        received += len(chunk)
        elapsed = time.monotonic() - since
        if elapsed > patience.read:
            if received < patience.slowest * elapsed:
                raise _BrokenOffError(f"only {received:,} bytes came in {elapsed:.0f} s")
            since, received = time.monotonic(), 0


def _require_space(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise DataError(
            f"The disk is too full for {part.with_suffix('').name}: {needed:,} bytes are still to come, {free:,} are "
            f"free in {part.parent}. Make room, or set LABKIT_CACHE to a folder on another disk; what came is kept."
        )


def _disk_error(error: OSError, part: Path) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"The disk became full after {_length(part):,} bytes of {part.with_suffix('').name} in {part.parent}. "
            "Make room, or set LABKIT_CACHE to a folder on another disk; what came is kept."
        )
    return DataError(f"{part} could not be written: {error.strerror or error}.")


def _cause(error: Exception) -> str:
    """The cause in a few words; the libraries wrap it in several layers of their own names."""
    text = str(error)
    if isinstance(error, requests.ConnectTimeout):
        return "the server can't be reached in time"
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return "the server stays silent"
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy can't be reached or refuses"
    if isinstance(error, requests.exceptions.SSLError):
        return "the server's certificate is not accepted"
    if "Name or service" in text or "resolve" in text or "getaddrinfo" in text:
        return "the server's name can't be resolved, perhaps there is no network"
    if "refused" in text:
        return "the server refuses the connection"
    if isinstance(error, requests.ConnectionError | urllib3.exceptions.ProtocolError):
        return "the connection broke off"
    return text


def _write(out: BinaryIO, chunk: bytes) -> None:
    out.write(chunk)


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
