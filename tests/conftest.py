"""What every test stands on: nothing of the user's own Jupyter settings or workspace is read or written."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# set while this file is imported, before any test module imports torch or starts a process
_own = tempfile.TemporaryDirectory(prefix="labkit-tests-")
for _variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "LABKIT_WORKSPACE"):
    _folder = Path(_own.name) / _variable.lower()
    _folder.mkdir()
    os.environ[_variable] = str(_folder)
os.environ["OMP_NUM_THREADS"] = "1"  # several processes share the cores


def pytest_unconfigure() -> None:
    _own.cleanup()


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder that holds `notebooks/` and `labkit/`."""
    return ROOT


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    """Two ranks for all tests of a module."""
    from labkit.ranks import Ranks  # takes seconds, and most modules need none

    with Ranks(2) as ranks:
        yield ranks
