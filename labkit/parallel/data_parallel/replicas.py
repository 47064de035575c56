"""Making the ranks' copies of a model equal: compared in their shapes, given the values of the group's first rank."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from labkit.collectives import all_gather_into_tensor, broadcast
from labkit.collectives.agreement import describe
from labkit.collectives.calls import operation
from labkit.collectives.groups import Endpoint


def check_same_model(module: nn.Module, end: Endpoint, *, device: torch.device) -> None:
    """Raise the same RuntimeError on every rank, naming the first that differs, where two ranks' parameters or buffers
    differ in name, shape, dtype, or in being trained. Eight bytes a rank where all is well; control traffic."""
    if end.size == 1:
        return
    mine = [_words(name, parameter) for name, parameter in module.named_parameters()]
    mine += [_words(name, buffer) + " (buffer)" for name, buffer in module.named_buffers()]
    text = "\n".join(mine).encode()
    with operation("agreement", end, control=True):
        digests = torch.empty(end.size, 8, dtype=torch.uint8, device=device)
        own = bytearray(hashlib.sha256(text).digest()[:8])
        all_gather_into_tensor(digests, torch.frombuffer(own, dtype=torch.uint8).to(device), end.group)
        seen = digests.tolist()
        if all(digest == seen[0] for digest in seen):
            return
        other = next(place for place, digest in enumerate(seen) if digest != seen[0])
        theirs = [_text_of(place, text, end, device).split("\n") for place in (0, other)]
    first, second = theirs
    for one, two in zip([*first, "nothing more"], [*second, "nothing more"], strict=False):
        if one != two:
            raise RuntimeError(
                f"DistributedDataParallel: rank {end.members[0]} has {one} but rank {end.members[other]} has {two}: "
                "build the same model on every rank"
            )


def _words(name: str, tensor: torch.Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{name}, {describe(tensor)}{' (frozen)' if frozen else ''}"


def _text_of(place: int, text: bytes, end: Endpoint, device: torch.device) -> str:
    """The text of the group's rank `place`."""
    length = torch.tensor([len(text)], device=device)
    broadcast(length, group=end.group, group_src=place)
    content = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if end.place == place and text:
        content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    broadcast(content, group=end.group, group_src=place)
    return bytes(content.tolist()).decode()


def broadcast_tensors(tensors: Iterable[torch.Tensor], end: Endpoint, *, source: int = 0) -> None:
    """Set tensors to those of the group's rank `source`: one broadcast for each device, of whatever dtypes.

    A tensor whose values are the same already is not written to, so that what autograd has saved of it stays valid.
    """
    places: dict[torch.device, list[torch.Tensor]] = {}
    # the widest first, so that each part of the flat tensor is aligned for its dtype
    for tensor in sorted(tensors, key=lambda tensor: -tensor.element_size()):
        places.setdefault(tensor.device, []).append(tensor.detach())
    for together in places.values():
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in together]
        flat = torch.cat(parts)
        broadcast(flat, group=end.group, group_src=source)
        if end.place == source:
            continue
        for tensor, part in zip(together, flat.split([len(part) for part in parts]), strict=True):
            value = part.view(tensor.dtype).view(tensor.shape)
            if not torch.equal(tensor, value):
                tensor.copy_(value)
