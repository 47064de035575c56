"""On the emulated network: a short payload and the time of its arrival in one message.

A header of its own would be a second message, whose cost is real time beside the emulated latency.
"""

import torch

LONGEST = 1 << 16  # bytes of payload: a longer one takes more time to copy than a header takes to send


def fits(tensor: torch.Tensor) -> bool:
    """Whether a payload is short enough to be copied."""
    return tensor.numel() * tensor.element_size() <= LONGEST


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """A buffer for a payload like `tensor` with its stamp: uint8 [bytes + 8]."""
    return torch.empty(tensor.numel() * tensor.element_size() + 8, dtype=torch.uint8)


def stamp(tensor: torch.Tensor, arrival: float) -> torch.Tensor:
    """The contiguous payload, and after it the arrival in seconds: uint8 [bytes + 8]."""
    whole = room_for(tensor)
    whole[:-8] = tensor.detach().reshape(-1).view(torch.uint8)
    whole[-8:] = torch.tensor([arrival], dtype=torch.float64).view(torch.uint8)
    return whole


def unstamp(whole: torch.Tensor, tensor: torch.Tensor) -> float:
    """Put the payload into `tensor`; returns the arrival."""
    tensor.copy_(whole[:-8].view(tensor.dtype).view(tensor.shape))
    arrival: float = whole[-8:].clone().view(torch.float64).item()
    return arrival
