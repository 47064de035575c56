"""A server on this machine that misbehaves in every way a server can, and a set to fetch from it.

Modules that want its fixtures say `pytest_plugins = ["faulty_server"]`; they import names from it as well, so pytest
can't rewrite its asserts any more and need not warn of it (PYTEST_DONT_REWRITE).
"""

import hashlib
import io
import os
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from labkit.data.downloading import Patience
from labkit.data.errors import DataError
from labkit.data.registry import RegistryEntry, RemoteFile

NAME = "imagenette2-160-mini.tgz"
HASTY = Patience(connect=2.0, read=0.3, attempts=3, backoff=0.01, slowest=256.0)


class Server(ThreadingHTTPServer):
    """Serves `content`, one fault of `faults` a request, then `always`; keeps the Range header of each request."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.faults: list[str] = []
        self.always = ""
        self.requests: list[str] = []
        self.hosts: list[str] = []
        self.sent = 0
        self.go = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # a client that goes away is what some tests want


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        server, asked = self.server, self.headers.get("Range", "")
        server.requests.append(asked)
        server.hosts.append(urlsplit(self.path).netloc)
        fault = server.faults.pop(0) if server.faults else server.always
        content = server.content
        if fault.isdecimal():
            self.send_error(int(fault))
            return
        if fault == "silent":
            server.go.wait(20)
            return
        if fault == "other bytes":
            content = bytes(byte ^ 1 for byte in content[:1000]) + content[1000:]
        if fault == "shorter":
            content = content[:-7]
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and fault != "no range" else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = content[start:]
        self.send_response(206 if asked and fault != "no range" else 200)
        if asked and fault != "no range":
            claimed = 0 if fault == "wrong range" else start
            self.send_header("Content-Range", f"bytes {claimed}-{len(content) - 1}/{len(content)}")
        if fault not in ("no length", "endless"):
            self.send_header("Content-Length", str(len(body)))
        if fault == "gzip label":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if fault == "drop":
            body = body[: len(body) // 2]
        if fault == "trickle":
            for byte in body[:30]:  # a test whose client puts up with it ends too
                if server.go.wait(0.1):
                    return
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
            return
        if fault == "shorter":
            server.go.wait(20)
        if fault == "endless":
            while server.sent < 64 * 2**20:
                self.wfile.write(bytes(2**16))
                server.sent += 2**16
            return
        if fault == "wait":
            self.wfile.write(body[:1000])
            self.wfile.flush()
            server.go.wait(60)
            body = body[1000:]
        self.wfile.write(body)


def made_archive() -> bytes:
    """An archive of Imagenette's layout, for where the real photographs are not at hand; noise doesn't compress."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for split in ("train", "val"):
            for wnid in ("n01440764", "n02102040"):
                for number in range(20):
                    content = hashlib.shake_128(f"{split}{wnid}{number}".encode()).digest(30_000)
                    member = tarfile.TarInfo(f"imagenette2-160/{split}/{wnid}/{wnid}_{number}.JPEG")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture(scope="session")
def content() -> bytes:
    fixtures = os.environ.get("LABKIT_FIXTURES")
    return (Path(fixtures) / NAME).read_bytes() if fixtures else made_archive()


@pytest.fixture
def server(content):
    server = Server(content)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.go.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def direct(monkeypatch, tmp_path):
    """No proxy between the tests and this machine, no rank from the environment, and a cache of their own."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def entry(server, content, direct) -> RegistryEntry:
    pinned = RemoteFile(f"{server.url}/{NAME}", "sha256:" + hashlib.sha256(content).hexdigest(), len(content))
    return RegistryEntry(
        name="mini", kind="image", title="", licence="", source="", files=(pinned,), folder="imagenette2-160"
    )


@pytest.fixture
def part(tmp_path) -> Path:
    return tmp_path / "cache" / "downloads" / "mini" / f"{NAME}.part"


def have_part(part: Path, content: bytes) -> None:
    part.parent.mkdir(parents=True)
    part.write_bytes(content)


def sentence(error: "pytest.ExceptionInfo[DataError]") -> str:
    assert "\n" not in str(error.value)
    return str(error.value)
