"""Offloading: what autograd saves for backward goes to a file on disk, or to the host's memory, and comes back.

Checkpointing pays for memory with computing, offloading with transfers. Around a checkpoint, it takes what the
checkpoint holds, the arguments. Sources: the hooks are torch.autograd.graph.saved_tensors_hooks in the documentation
of PyTorch; S. Rajbhandari and others, ZeRO-Infinity (2021), arXiv:2104.07857, section 5.1, offloads activations.
"""

import os
import tempfile
import weakref
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter


class save_on_cpu(saved_tensors_hooks):
    """Inside, what is saved on another device is copied to the host's memory, as by torch.autograd.graph.save_on_cpu.

    `pin_memory` uses page-locked memory, from which a GPU copies without waiting. What is on the CPU already stays as
    it is. Unverified on a GPU.
    """

    def __init__(self, pin_memory: bool = False) -> None:
        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            if tensor.device.type == "cpu" or _is_parameter(tensor):
                return tensor.device, tensor.detach()
            host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pin_memory)
            return tensor.device, host.copy_(tensor)

        def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
            device, tensor = packed
            return tensor.to(device, non_blocking=pin_memory)

        super().__init__(pack, unpack)


class save_on_disk(saved_tensors_hooks):
    """Inside, what is saved for backward goes to files in `folder` (a temporary one), and is mapped into memory again
    when backward asks for it. Tensors of less than `min_bytes`, and parameters, stay where they are.

    A storage that is saved several times, as by query, key and value, is one file; it goes with the last reference to
    it. The bytes that lie there now are `written_bytes`. A disk that is full is an OSError that names folder and size.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, min_bytes: int = 4096) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise FileNotFoundError(f"save_on_disk: there is no folder {folder}: make it first, or name another one.")
        self._folder = tempfile.TemporaryDirectory(prefix="labkit-saved-", dir=folder)
        self._min_bytes = min_bytes
        self._files: weakref.WeakValueDictionary[tuple[Any, ...], _File] = weakref.WeakValueDictionary()
        self._written: weakref.WeakSet[_File] = weakref.WeakSet()
        self._count = 0
        super().__init__(self._pack, _unpack)

    @property
    def written_bytes(self) -> int:
        """Bytes on the disk now."""
        return sum(file.nbytes for file in self._written)

    def _pack(self, tensor: Tensor) -> Any:
        # a storage does not know that a view of it is conjugated or negated
        tensor = tensor.resolve_conj().resolve_neg() if tensor.layout is torch.strided else tensor
        # views of a large storage take it whole, once; strides are kept
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage is None or storage.nbytes() < self._min_bytes or _is_parameter(tensor):
            return tensor.detach()
        key = storage._cdata, storage.nbytes(), tensor._version
        file = self._files.get(key)
        if file is None or file.source() is None:  # another storage at the same address
            file = self._files[key] = _File(Path(self._folder.name) / str(self._count), storage, self._folder)
            self._written.add(file)
            self._count += 1
        return _OnDisk(file, tensor)

    def __enter__(self) -> Self:  # type: ignore[override]
        super().__enter__()
        return self


class _File:
    """The content of a storage in a file, which goes with this object. Holds on to the folder it lies in."""

    def __init__(self, path: Path, storage: torch.UntypedStorage, folder: Any) -> None:
        self.path, self.nbytes, self.device, self.folder = path, storage.nbytes(), storage.device, folder
        self.source = weakref.ref(storage)
        try:
            mapped = torch.UntypedStorage.from_file(str(path), True, self.nbytes)
            mapped.copy_(storage)
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"save_on_disk could not write {self.nbytes / 1e6:.4g} MB to {path.parent}: {error}; free some room or "
                "name another folder."
            ) from None

    def read(self) -> torch.UntypedStorage:
        # a private mapping: pages are read when they are touched, and what is written to them stays in memory
        storage: Any = torch.UntypedStorage.from_file(str(self.path), False, self.nbytes)
        return storage if self.device.type == "cpu" else storage.to(device=self.device)  # type: ignore[no-any-return]

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


class _OnDisk:
    __slots__ = ("dtype", "file", "offset", "size", "stride")

    def __init__(self, file: _File, tensor: Tensor) -> None:
        self.file, self.dtype = file, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def read(self) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.file.device)
        return empty.set_(self.file.read(), self.offset, self.size, self.stride)


def _unpack(packed: Any) -> Tensor:
    return packed.read() if isinstance(packed, _OnDisk) else packed


def _is_parameter(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, Parameter)
