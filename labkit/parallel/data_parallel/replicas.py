"""Making the ranks' copies of a model equal: compared in their shapes, given the values of the group's first rank."""

import hashlib
from collections.abc import Iterable, Sequence

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


class Packing:
    """Tensors of any dtypes on one device side by side in one flat tensor, so that one message carries them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # the widest first, so that each part of the flat tensor is aligned for its dtype
        self.tensors = sorted((tensor.detach() for tensor in tensors), key=lambda tensor: -tensor.element_size())
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors]
        self.flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.tensors[0].device)
        parts = zip(self.tensors, self.flat.split(sizes), strict=True)
        self.views = [part.view(tensor.dtype).view(tensor.shape) for tensor, part in parts]

    def broadcast(self, end: Endpoint, source: int) -> None:
        """Set the tensors to those of the group's rank `source`. One whose values are the same already is not written
        to, so that what autograd has saved of it stays valid."""
        if end.place == source:
            torch._foreach_copy_(self.views, self.tensors)
        broadcast(self.flat, group=end.group, group_src=source)
        if end.place != source:
            pairs = zip(self.tensors, self.views, strict=True)
            changed = [(tensor, view) for tensor, view in pairs if not torch.equal(tensor, view)]
            if changed:
                torch._foreach_copy_([tensor for tensor, _ in changed], [view for _, view in changed])


def pack(tensors: Iterable[torch.Tensor]) -> list[Packing]:
    """A packing for each device."""
    places: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        places.setdefault(tensor.device, []).append(tensor)
    return [Packing(together) for together in places.values()]


def broadcast_tensors(tensors: Iterable[torch.Tensor], end: Endpoint, *, source: int = 0) -> None:
    """Set tensors to those of the group's rank `source`: one broadcast for each device, of whatever dtypes."""
    with torch.no_grad():
        for packing in pack(tensors):
            packing.broadcast(end, source)
