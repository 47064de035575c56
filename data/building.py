"""What the build scripts share: gzip files with reproducible bytes, the data card, and the list of checksums."""

import gzip
import hashlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
_BASELINES = "## Baselines"


def write_gzip(path: Path, content: bytes) -> None:
    """Compress `content` so that the same content gives the same bytes: no name and no time in the header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as packed:
        packed.write(content)


def write_card(path: Path, text: str) -> None:
    """Write a data card and keep the section of measured baselines that stands in the old one."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    start = old.find(_BASELINES)
    kept = "\n" + old[start:] if start >= 0 else ""
    path.write_text(text.strip() + "\n" + kept, encoding="utf-8")


def write_baselines(path: Path, text: str) -> None:
    """Replace the last section of a data card, the measured baselines."""
    card = path.read_text(encoding="utf-8").partition(_BASELINES)[0]
    path.write_text(f"{card.rstrip()}\n\n{_BASELINES}\n\n{text.strip()}\n", encoding="utf-8")


def write_checksums() -> None:
    """List the SHA-256 of every embedded data file in `SHA256SUMS`; `sha256sum -c SHA256SUMS` reads it too."""
    files = sorted(p for pattern in ("*/*.gz", "*/*.json", "*/*.txt") for p in HERE.glob(pattern))
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(HERE).as_posix()}\n" for p in files]
    (HERE / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
