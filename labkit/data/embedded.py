"""Where the data sets that come with the workbook are: the repository's `data/` folder."""

import os
from pathlib import Path

from labkit.data.errors import DataError


def data_folder() -> Path:
    """The folder of the embedded data sets: the one LABKIT_DATA names, else `data/` beside the package.

    Raises `DataError` where it isn't there, as after an install that is not editable.
    """
    named = os.environ.get("LABKIT_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "data"
    if not folder.is_dir():
        raise DataError(
            f"The folder of the embedded data sets, {folder}, is missing: set LABKIT_DATA to the data/ folder of the "
            "repository, or install the package from there with pip install -e."
        )
    return folder


def embedded_file(name: str, file: str) -> Path:
    """The path of one file of the embedded set `name`, checked to be there."""
    path = data_folder() / name / file
    if not path.is_file():
        raise DataError(
            f"The embedded set {name} lacks {path}: restore it with git, or set LABKIT_DATA to a folder that has it."
        )
    return path
