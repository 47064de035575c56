"""What exercises on several ranks give to an answer: tensors that every rank can make again, and where it runs."""

from typing import Any


def drawn(seed: int, *shape: int) -> Any:
    """float32 of `shape` from the standard normal distribution: the same for a seed on every rank and at every call.

    The generator is its own, so PyTorch's global one stays as it is.
    """
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rank_and_size() -> tuple[int, int]:
    """This process's rank in the world, and how many ranks there are."""
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()
