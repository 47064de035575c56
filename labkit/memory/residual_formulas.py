"""Bytes held for backward at the end of a forward pass of labkit's residual network, loss included, on the CPU.

What autograd saves is what the backward formula of each operation needs: a convolution its input, a norm its input and
mean and 1/std of each channel (each group of each sample), ReLU its output, max pooling its input and where each
maximum was (int64), a linear layer its input; adding and averaging save nothing. What is the output of one operation
and the input of the next is held once. So each convolution costs its output, which the norm behind it holds, and each
ReLU costs its output, which the next convolution holds too. Parameters and the images themselves are not counted here.

Source of the shapes: He et al. (2016), arXiv:1512.03385, table 1.
"""

import torch

from labkit.memory.activation_formulas import cross_entropy_activations

# depth: convolutions of a block's main path; blocks in each stage; width of each; how many times as wide its output is
_STAGES: dict[int, tuple[int, tuple[int, ...], tuple[int, ...], int]] = {
    8: (2, (1, 1, 1), (16, 32, 64), 1),
    18: (2, (2, 2, 2, 2), (64, 128, 256, 512), 1),
    50: (3, (3, 4, 6, 3), (64, 128, 256, 512), 4),
}


def resnet_activations(
    depth: int,
    *,
    batch_size: int,
    side: int,
    num_classes: int,
    stem: str = "small",
    norm: str = "batch",
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes that `labkit.models.resnet` and the cross-entropy hold for backward, in training.

    `side` is that of the images in pixels; depth, `stem` and `norm` are as in `resnet`.
    """
    stem_held, indices, blocks = _stem_and_blocks(depth, batch_size, side, stem, norm)
    numbers = stem_held + sum(held for _, held, _ in blocks)
    return dtype.itemsize * numbers + 8 * indices + residual_head(depth, batch_size, num_classes, dtype)


def residual_head(depth: int, batch_size: int, num_classes: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that the last linear layer holds, which is the mean of each channel, and the cross-entropy."""
    _, _, widths, wider = _STAGES[depth]
    mean = dtype.itemsize * batch_size * widths[-1] * wider
    return mean + cross_entropy_activations(batch_size, num_classes, dtype)


def residual_blocks(
    depth: int, *, batch_size: int, side: int, stem: str = "small", norm: str = "batch"
) -> list[tuple[int, int, int]]:
    """For each block how many numbers its input has, how many it holds, its output included, and its output has."""
    return _stem_and_blocks(depth, batch_size, side, stem, norm)[2]


def _stem_and_blocks(
    depth: int, batch_size: int, side: int, stem: str, norm: str
) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Numbers that the stem holds, its output included; indices of pooling; and what `residual_blocks` returns."""
    if depth not in _STAGES:
        raise ValueError(f"there is no resnet of depth {depth}: choose 8, 18 or 50.")
    convolutions, counts, widths, wider = _STAGES[depth]

    def held(channels: int, side: int, *, norms: int, relus: int) -> int:
        """Numbers for so many norms with a convolution before each, and so many ReLUs."""
        statistics = channels if norm == "batch" else batch_size * min(32, channels // 4)
        return (norms + relus) * batch_size * channels * side**2 + norms * 2 * statistics

    channels, indices = widths[0], 0
    side = side if stem == "small" else -(-side // 2)
    stem_held = held(channels, side, norms=1, relus=1)
    if stem == "imagenet":
        side = -(-side // 2)
        stem_held += batch_size * channels * side**2  # what was pooled
        indices = batch_size * channels * side**2
    blocks = []
    for stage, (count, width) in enumerate(zip(counts, widths, strict=True)):
        for i in range(count):
            before, side = side, -(-side // 2) if stage and i == 0 else side
            numbers, into = 0, batch_size * channels * before**2
            if convolutions == 3:
                numbers += held(width, before, norms=1, relus=1)  # the stride comes after it
            numbers += held(width, side, norms=1, relus=1)
            shortcut = int(before != side or channels != width * wider)
            numbers += held(width * wider, side, norms=1 + shortcut, relus=1)
            channels = width * wider
            blocks.append((into, numbers, batch_size * channels * side**2))
    return stem_held, indices, blocks
