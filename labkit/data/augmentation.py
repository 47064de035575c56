"""Random crops and flips that depend on nothing but (seed, epoch, index).

Whichever rank or loader worker prepares a sample, and in whatever order, it comes out the same; so a run can be
replayed in one process and resumed in the middle of an epoch.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def draws(seed: int, epoch: int, index: int, count: int) -> list[int]:
    """`count` random integers of 32 bits for one sample in one epoch, by numpy's SeedSequence.

    SeedSequence mixes its words so that neighbouring seeds, epochs and indices give unrelated numbers, and numpy
    keeps its output stable across versions and platforms.
    """
    return [int(word) for word in np.random.SeedSequence((seed, epoch, index)).generate_state(count, np.uint32)]


def crop_and_flip(images: Tensor, indices: Sequence[int], *, seed: int, epoch: int, padding: int) -> Tensor:
    """Pad each image [B, C, H, W] with zeros, cut out its size at a random place, and flip every other one.

    The augmentation of He et al. (2016), "Deep Residual Learning for Image Recognition", section 4.2, where
    `padding` is 4 pixels for images of 32 x 32.
    """
    batch, channels, height, width = images.shape
    random = torch.tensor([draws(seed, epoch, index, 3) for index in indices], dtype=torch.int64).reshape(batch, 3)
    rows = (random[:, 0] % (2 * padding + 1))[:, None] + torch.arange(height)
    columns = (random[:, 1] % (2 * padding + 1))[:, None] + torch.arange(width)
    columns = torch.where(random[:, 2, None] % 2 == 1, columns.flip(1), columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    sample = torch.arange(batch)[:, None, None, None]
    channel = torch.arange(channels)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
