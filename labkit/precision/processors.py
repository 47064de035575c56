"""What this machine multiplies in 16 bits by itself, and what it would have to imitate at a high price."""

import platform
from functools import lru_cache
from pathlib import Path

import torch

#: for each dtype the flags of /proc/cpuinfo, x86's and ARM's, any of which means instructions for its products
_FLAGS = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "fphp", "asimdhp"),
}


@lru_cache(maxsize=1)
def processor_flags() -> frozenset[str]:
    """The flags of this machine's processor by Linux's names; empty where the system doesn't tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    words = (line.partition(":")[2] for line in lines if line.split(":")[0].strip() in ("flags", "Features"))
    return frozenset(next(words, "").split())


def native(dtype: torch.dtype, device_type: str = "cpu") -> str:
    """By which instructions this machine multiplies `dtype` (bfloat16 or float16): their name; empty if by none."""
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return ""
        major, minor = torch.cuda.get_device_capability()
        return "tensor cores" if (major, minor) >= ((8, 0) if dtype is torch.bfloat16 else (7, 0)) else ""
    if dtype not in _FLAGS:
        return ""
    found = [flag for flag in _FLAGS[dtype] if flag in processor_flags()]
    if not found and platform.system() == "Darwin" and platform.machine() == "arm64":
        return "ARMv8.2 FP16" if dtype is torch.float16 else ""
    return found[0] if found else ""
