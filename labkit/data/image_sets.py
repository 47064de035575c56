"""Labelled images that fit in memory, and `images`, which opens any image set by name or path."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from labkit.data.augmentation import crop_and_flip
from labkit.data.cifar import read_cifar10
from labkit.data.idx import read_idx
from labkit.data.image_folders import IMAGENET_MEAN, IMAGENET_STD, FolderImages, open_folder
from labkit.data.locating import check_request, locate

FASHION_MNIST_MEAN: tuple[float, ...] = (0.2861,)  # of the pixels / 255 of the train split, see its data card
FASHION_MNIST_STD: tuple[float, ...] = (0.3533,)


class ImageBatches(Protocol):
    """What a training loop asks of an image set."""

    classes: tuple[str, ...]
    labels: Tensor

    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]: ...


class ImageSet(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory as bytes; they become normalised floats when they are asked for.

    `images` uint8 [N, C, H, W], `labels` int64 [N], `classes` their names, `mean` and `std` one value a channel on
    the scale 0 to 1. With `augment`, images are cropped and flipped at random, by (seed, epoch, index) alone; tell
    it the epoch with `set_epoch`, as with PyTorch's DistributedSampler.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        classes: Sequence[str],
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if len(images) != len(labels):
            raise ValueError(f"There are {len(images)} images but {len(labels)} labels: each image needs one.")
        self.images, self.labels, self.classes = images, labels.long(), tuple(classes)
        self.augment, self.seed, self.epoch, self.dtype = augment, seed, 0, dtype
        self._mean = 255 * torch.tensor(mean, dtype=dtype).reshape(-1, 1, 1)
        self._std = 255 * torch.tensor(std, dtype=dtype).reshape(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image [C, H, W] and its label, a scalar."""
        images, labels = self.batch([index])
        return images[0], labels[0]

    def set_epoch(self, epoch: int) -> None:
        """Draw other crops and flips from here on."""
        self.epoch = epoch

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, C, H, W], normalised, and labels [B]."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images[chosen]
        if self.augment:
            padding = self.images.shape[-1] // 8  # 4 pixels of 32
            numbers = (chosen % len(self)).tolist()  # a sample counted from the end is still the same sample
            images = crop_and_flip(images, numbers, seed=self.seed, epoch=self.epoch, padding=padding)
        return self._normalised(images), self.labels[chosen]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All images [N, C, H, W], normalised but never augmented, and all labels [N]."""
        return self._normalised(self.images), self.labels

    def _normalised(self, images: Tensor) -> Tensor:
        return images.to(self.dtype).sub_(self._mean).div_(self._std)


def images(
    name: str | Path = "fashion-mnist",
    split: str = "train",
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    size: int | None = None,
    augment: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> ImageSet | FolderImages:
    """Open an image set; `split` is "train" or "test" (the labelled part held out, if called "val" too).

    `name` is "fashion-mnist", which is embedded and the default; "cifar-10", "imagenette2-160", "imagenette2-320" or
    "tiny-imagenet", which are fetched (`labkit data fetch`) or lie unpacked in `folder`; or the path of any set in the
    layout of ImageFolder, `<split>/<class>/<image>`. `limit` keeps so many images; `size` is the side in pixels of the
    square that sets of files deliver (128 if not given, 64 for Tiny ImageNet). Colour images are normalised by the
    statistics of ImageNet. `augment` crops and flips at random; use it for training only.

    Raises `DataError` for data that can't be found or read, `ValueError` for other arguments, each in one sentence.
    """
    check_request(split, limit)
    known, place = locate(name, "image", folder)
    if known not in ("fashion-mnist", "cifar-10"):
        return open_folder(known, place, split, limit=limit, size=size, augment=augment, seed=seed, dtype=dtype)
    if known == "fashion-mnist":
        mean, std = FASHION_MNIST_MEAN, FASHION_MNIST_STD
        pixels, labels, classes = _fashion_mnist(place, split)
    else:
        mean, std = IMAGENET_MEAN, IMAGENET_STD
        pixels, labels, classes = read_cifar10(place, split)
    if size not in (None, pixels.shape[-1]):
        raise ValueError(f"{known} has images of {pixels.shape[-1]} pixels a side: leave size={size} out.")
    return ImageSet(
        pixels[:limit], labels[:limit], classes=classes, mean=mean, std=std, augment=augment, seed=seed, dtype=dtype
    )


def _fashion_mnist(folder: Path, split: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    part = "train" if split == "train" else "t10k"
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    classes = (folder / "classes.txt").read_text(encoding="utf-8").splitlines()
    return pixels[:, None], labels, tuple(classes)
