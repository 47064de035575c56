"""Image sets that lie as files in folders: ImageFolder's layout, Imagenette, Tiny ImageNet.

torchvision is imported where it is used: that takes nearly as long as torch itself, and the other sets do without.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from labkit.data.augmentation import draws
from labkit.data.errors import DataError
from labkit.data.locating import find_layout, spread

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # torchvision's documentation of its pretrained models
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGENETTE = {  # https://github.com/fastai/imagenette
    "n01440764": "tench", "n02102040": "English springer", "n02979186": "cassette player", "n03000684": "chain saw",
    "n03028079": "church", "n03394916": "French horn", "n03417042": "garbage truck", "n03425413": "gas pump",
    "n03445777": "golf ball", "n03888257": "parachute",
}  # fmt: skip


class FolderImages(Dataset[tuple[Tensor, Tensor]]):
    """Images read from files when asked for, as normalised floats [3, size, size].

    `samples` are pairs of path and label. Without `augment`: the shorter side becomes `resize` pixels, then the
    middle is cut out. With it: a random part of 35 to 100 percent of the area, resized and flipped at random, by
    (seed, epoch, index) alone. `batch` reads one file after the other; a DataLoader reads them in workers.
    """

    def __init__(
        self,
        samples: Sequence[tuple[str, int]],
        *,
        classes: Sequence[str],
        size: int,
        resize: int | None = None,
        augment: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from torchvision.transforms import v2

        self.paths = [path for path, _ in samples]
        self.labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
        self.classes = tuple(classes)
        self.augment, self.seed, self.epoch = augment, seed, 0
        if augment:
            spatial: list[torch.nn.Module] = [v2.RandomResizedCrop(size, scale=(0.35, 1.0)), v2.RandomHorizontalFlip()]
        else:
            spatial = [v2.Resize(resize or round(size * 256 / 224)), v2.CenterCrop(size)]
        pixels = [v2.ToImage(), v2.ToDtype(dtype, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
        self._transform = v2.Compose([*spatial, *pixels])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image [3, size, size] and its label, a scalar."""
        path = self.paths[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")  # some files are grey
        except (OSError, SyntaxError) as error:  # PIL raises SyntaxError for some broken files
            raise DataError(f"{path} can't be read as an image ({error}): restore or remove it.") from None
        with torch.random.fork_rng(devices=[]):  # the transforms draw from the CPU's global generator
            if self.augment:
                high, low = draws(self.seed, self.epoch, index % len(self), 2)
                torch.default_generator.manual_seed(high << 32 | low)  # torch.manual_seed would reset the GPUs' too
            return self._transform(image).as_subclass(Tensor), self.labels[index]

    def set_epoch(self, epoch: int) -> None:
        """Draw other crops and flips from here on; loader workers that persist don't hear of it."""
        self.epoch = epoch

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, 3, size, size] and labels [B]."""
        samples = [self[int(index)] for index in indices]
        return torch.stack([image for image, _ in samples]), torch.stack([label for _, label in samples])


def open_folder(
    known: str,
    place: Path,
    split: str,
    *,
    limit: int | None,
    size: int | None,
    augment: bool,
    seed: int,
    dtype: torch.dtype,
) -> FolderImages:
    """The part of `images` that reads files; `known` is the registered name of the set, "" for any other."""
    if size is not None and size < 8:
        raise ValueError(f"size must be at least 8 pixels, not {size}.")
    resize = None
    if known == "tiny-imagenet":
        samples, classes = _tiny_imagenet(find_layout(place, "wnids.txt", what="Tiny ImageNet"), split)
        resize = size = size or 64  # the images have this size: cut nothing off
    else:
        samples, names = _image_folder(find_layout(place, "train", what="an image set"), split)
        classes = tuple(IMAGENETTE.get(name, name) for name in names) if known.startswith("imagenette") else names
    if not samples:
        raise DataError(f"The {split} split in {place} has no images: look into its folders.")
    samples = [samples[i] for i in spread(len(samples), limit)]
    return FolderImages(
        samples, classes=classes, size=size or 128, resize=resize, augment=augment, seed=seed, dtype=dtype
    )


def _image_folder(folder: Path, split: str) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """Samples of one split and the class names, always those of the train split, so that labels agree."""
    held_out = next((name for name in ("test", "val") if any(folder.glob(f"{name}/*/"))), "test")
    part = folder / ("train" if split == "train" else held_out)
    if not part.is_dir():
        raise DataError(f"{folder} has no {split} split: there is no folder {part}.")
    classes = tuple(sorted(path.name for path in (folder / "train").iterdir() if path.is_dir()))
    unknown = sorted({path.name for path in part.iterdir() if path.is_dir()} - set(classes))
    if unknown:
        raise DataError(f"{part} has the class {unknown[0]!r}, which the train split lacks.")
    numbers = {name: number for number, name in enumerate(classes)}
    return _labelled_files(part, numbers), classes


def _labelled_files(folder: Path, numbers: dict[str, int]) -> list[tuple[str, int]]:
    """The images below `<folder>/<class>`, in order of class and name."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    found: list[tuple[str, int]] = make_dataset(str(folder), numbers, extensions=IMG_EXTENSIONS, allow_empty=True)
    return found


def _tiny_imagenet(folder: Path, split: str) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """Tiny ImageNet: train/<wnid>/images/*.JPEG, but val/images/*.JPEG with the labels in val_annotations.txt.

    Its own test split has no labels, so that "test" here is its val.
    """
    try:
        wnids = sorted((folder / "wnids.txt").read_text(encoding="utf-8").split())
        rows = (folder / "val" / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
        words = dict(line.split("\t")[:2] for line in (folder / "words.txt").read_text(encoding="utf-8").splitlines())
        numbers = {wnid: number for number, wnid in enumerate(wnids)}
        held_out = [(str(folder / "val/images" / row.split("\t")[0]), numbers[row.split("\t")[1]]) for row in rows]
    except (OSError, ValueError, LookupError) as error:
        raise DataError(f"{folder} is not Tiny ImageNet as it was unpacked ({error}): unpack it again.") from None
    classes = tuple(words.get(wnid, wnid).split(",")[0] for wnid in wnids)
    if split == "test":
        return held_out, classes
    return _labelled_files(folder / "train", numbers), classes
