"""CIFAR-10 from the files of its Python archive, which are pickles.

A pickle can run any code when it is loaded, so these are read by an unpickler that knows numpy arrays and nothing
else.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.data.errors import DataError
from labkit.data.locating import find_layout

_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,  # the name in files from numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays and the plain types that pickle knows without an import; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only numpy arrays are allowed")
        return _ALLOWED[module, name]


def read_arrays(path: Path) -> dict[bytes, Any]:
    """A pickled dictionary of numpy arrays, numbers and bytes; anything else in it is refused with `DataError`."""
    try:
        content = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except FileNotFoundError:
        raise DataError(f"CIFAR-10 lacks the file {path}: extract cifar-10-python.tar.gz again.") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path} was not loaded: {error or type(error).__name__}.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a file of CIFAR-10: it holds no dictionary.")
    return content


def read_cifar10(folder: Path, split: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images uint8 [N, 3, 32, 32], labels int64 [N] and class names; N is 50,000 for "train", 10,000 for "test".

    Source of the layout: <https://www.cs.toronto.edu/~kriz/cifar.html>: a row is 1,024 red, then green, then blue
    values, each plane row by row.
    """
    folder = find_layout(folder, "batches.meta", what="CIFAR-10")
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    parts = [read_arrays(folder / name) for name in names]
    meta = read_arrays(folder / "batches.meta")
    try:
        images = np.concatenate([np.asarray(part[b"data"], dtype=np.uint8) for part in parts]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([np.asarray(part[b"labels"], dtype=np.int64) for part in parts])
        classes = tuple(name.decode() for name in meta[b"label_names"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"The files in {folder} are not those of CIFAR-10 ({error!r}).") from None
    if len(images) != len(labels):
        raise DataError(f"The files in {folder} hold {len(images)} images but {len(labels)} labels.")
    return torch.from_numpy(images), torch.from_numpy(labels), classes
