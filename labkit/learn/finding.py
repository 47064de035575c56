"""What one look at the machine found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of `labkit doctor`. "note": lessons run, but slower or not all of them. "missing": they do not run."""

    name: str
    status: Literal["ok", "note", "missing"]
    found: str
    remedy: str = ""
