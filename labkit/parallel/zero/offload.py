"""Offload: an optimizer's state in memory-mapped files, so that it need not be in memory between steps.

Source: J. Ren and others, ZeRO-Offload (USENIX ATC 2021), arXiv:2101.06840, and S. Rajbhandari and others,
ZeRO-Infinity (SC21), arXiv:2104.07857, section 5.1: state that is touched once a step may live on a slower medium.
Here the operating system brings pages in while a step touches them, and writes them back when memory is short.
"""

import weakref
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer


def offload_optimizer_state(optimizer: Optimizer, folder: str | Path) -> None:
    """Keep the moments of a torch optimizer on the CPU, or the CPU's part of them, in files in `folder`.

    They move there right after the step that makes them: only the first step holds them in memory. Values are the same
    to the last bit. `folder` is this rank's own; it is made if need be, and its files are overwritten.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    count = 0

    def move(stepped: Optimizer, *_: Any) -> None:
        nonlocal count
        for state in stepped.state.values():
            for key, value in state.items():
                if not _should_move(value, target):
                    continue
                mapped = torch.from_file(
                    str(target / f"{count:05d}-{key}.bin"), shared=True, size=value.numel(), dtype=value.dtype
                ).view(value.shape)
                mapped.copy_(value)
                state[key] = mapped
                count += 1

    handle = optimizer.register_step_post_hook(move)
    weakref.finalize(optimizer, handle.remove).atexit = False


def is_offloaded(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a memory-mapped file."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def _should_move(value: Any, folder: Path) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0 and not is_offloaded(value)
