"""Image sets: fast, normalised, cropped and flipped reproducibly, and read from each layout as it is published."""

import io
import os
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.models import ResNet18_Weights

from labkit.data.augmentation import crop_and_flip, draws
from labkit.data.cifar import read_arrays
from labkit.data.embedded import data_folder
from labkit.data.errors import DataError
from labkit.data.image_folders import IMAGENET_MEAN, IMAGENET_STD, IMAGENETTE, FolderImages
from labkit.data.image_sets import ImageSet, images


def picture(path: Path, side: tuple[int, int] = (48, 40), grey: bool = False, seed: int = 0) -> None:
    """A photograph's stand-in: smooth random colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize(side, Image.Resampling.BICUBIC)
    (image.convert("L") if grey else image).save(path, format="JPEG")


@pytest.fixture(scope="module")
def imagenette(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of each class, in the archive's layout: real ones where LABKIT_FIXTURES points to them."""
    folder = tmp_path_factory.mktemp("imagenette")
    archive = Path(os.environ.get("LABKIT_FIXTURES", "nowhere")) / "imagenette2-160-mini.tgz"
    if archive.is_file():
        taken: dict[str, int] = {}
        with tarfile.open(archive) as tar:
            for member in tar:
                group = str(Path(member.name).parent)
                taken[group] = taken.get(group, 0) + 1
                if member.isfile() and taken[group] <= 3:
                    tar.extract(member, folder, filter="data")
    else:
        for seed, wnid in enumerate(IMAGENETTE):
            for split in ("train", "val"):
                for i in range(3):
                    name = f"imagenette2-160/{split}/{wnid}/{wnid}_{i}.JPEG"
                    picture(folder / name, (160, 213), grey=i == 2, seed=seed)
    return folder


# The embedded set


def test_the_default_set_is_20000_and_4000_grey_photographs_in_ten_classes() -> None:
    for split, count in (("train", 20_000), ("test", 4_000)):
        photographs = images(split=split)
        assert len(photographs) == count
        assert isinstance(photographs, ImageSet)
        assert (photographs.images.shape, photographs.images.dtype) == ((count, 1, 28, 28), torch.uint8)
        assert (photographs.labels.dtype, len(photographs.classes)) == (torch.int64, 10)
        assert photographs.classes[photographs.labels[0]] == "Ankle boot"


def test_normalised_train_images_have_mean_0_and_standard_deviation_1() -> None:
    photographs = images()
    assert isinstance(photographs, ImageSet)
    values, labels = photographs.tensors()
    assert values.dtype == torch.float32
    assert values.mean().item() == pytest.approx(0, abs=2e-4)
    assert values.std().item() == pytest.approx(1, abs=2e-4)
    assert torch.equal(labels, photographs.labels)
    assert photographs.images.float().mean() > 50  # the bytes themselves are left as they were


def test_a_batch_an_item_and_the_whole_agree_and_a_data_loader_reads_them() -> None:
    photographs = images(limit=50)
    assert isinstance(photographs, ImageSet)
    values, labels = photographs.tensors()
    some = [3, 0, 41]
    for indices in (some, torch.tensor(some)):
        batch, targets = photographs.batch(indices)
        assert torch.equal(batch, values[some]) and torch.equal(targets, labels[some])
    assert torch.equal(photographs[41][0], values[41]) and photographs[41][1] == labels[41]
    loaded, targets = next(iter(DataLoader(photographs, batch_size=50)))
    assert torch.equal(loaded, values) and torch.equal(targets, labels)


def test_float64_is_computed_in_float64() -> None:
    exact = images(limit=8, dtype=torch.float64)
    assert isinstance(exact, ImageSet)
    expected = (exact.images.double() / 255 - 0.2861) / 0.3533
    torch.testing.assert_close(exact.batch(range(8))[0], expected, rtol=1e-12, atol=1e-12)


# Augmentation


def test_augmented_samples_depend_on_seed_epoch_and_index_and_on_nothing_else() -> None:
    first = images(limit=40, augment=True)
    whole, _ = first.batch(range(40))
    torch.manual_seed(123)
    again, _ = images(limit=40, augment=True).batch([7, 31, 2])
    assert torch.equal(again, whole[[7, 31, 2]])
    assert torch.equal(first[7][0], whole[7])
    assert torch.equal(first[-1][0], whole[39])
    first.set_epoch(1)
    assert (first.batch(range(40))[0] != whole).flatten(1).any(1).sum() > 30
    first.set_epoch(0)
    assert torch.equal(first.batch(range(40))[0], whole)
    assert not torch.equal(images(limit=40, augment=True, seed=1).batch(range(40))[0], whole)


def test_augmenting_leaves_torchs_random_numbers_alone(imagenette: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("this seeds the GPUs too"))
    for photographs in (images(limit=4, augment=True), images("imagenette2-160", folder=imagenette, augment=True)):
        before = torch.get_rng_state()
        photographs.batch([0, 1])
        assert torch.equal(torch.get_rng_state(), before)


def test_each_crop_is_a_window_of_the_padded_image_or_of_its_mirror() -> None:
    numbers = torch.arange(1, 2 * 5 * 6 + 1).reshape(2, 5, 6)
    batch = numbers.repeat(200, 1, 1, 1)
    padded = torch.nn.functional.pad(numbers, (2, 2, 2, 2))
    windows = padded.unfold(1, 5, 1).unfold(2, 6, 1).movedim(0, 2).flatten(0, 1)  # 25 places x [2, 5, 6]
    known = {tuple(window.flatten().tolist()) for window in torch.cat([windows, windows.flip(-1)])}
    crops = [tuple(c.flatten().tolist()) for c in crop_and_flip(batch, range(200), seed=0, epoch=0, padding=2)]
    assert set(crops) <= known
    assert len(set(crops)) > 40  # of 50
    unflipped = {tuple(window.flatten().tolist()) for window in windows}
    assert 70 < sum(crop in unflipped for crop in crops) < 130


def test_the_draws_are_the_same_on_every_machine() -> None:
    assert draws(0, 1, 2, 3) == [3884055042, 715223343, 3054743997]
    assert draws(1, 0, 2, 3) != draws(0, 1, 2, 3)


# Folders


def test_imagenette_has_its_ten_classes_by_their_names(imagenette: Path) -> None:
    for folder in (imagenette, imagenette / "imagenette2-160"):
        for split in ("train", "test"):
            photographs = images("imagenette2-160", split, folder=folder, size=64)
            assert len(photographs) == 30
            assert photographs.classes[:3] == ("tench", "English springer", "cassette player")
            assert torch.bincount(photographs.labels).tolist() == [3] * 10
    values, labels = photographs.batch([0, 29])
    assert (values.shape, values.dtype, labels.tolist()) == ((2, 3, 64, 64), torch.float32, [0, 9])
    assert isinstance(photographs, FolderImages)
    assert "val" in Path(photographs.paths[0]).parts and "n01440764" in photographs.paths[0]


def test_colour_images_are_normalised_as_torchvisions_models_ask(imagenette: Path) -> None:
    transforms = ResNet18_Weights.IMAGENET1K_V1.transforms()
    assert (transforms.mean, transforms.std) == (list(IMAGENET_MEAN), list(IMAGENET_STD))
    photographs = images("imagenette2-160", "test", folder=imagenette, size=224)
    assert isinstance(photographs, FolderImages)
    with Image.open(photographs.paths[5]) as file:
        expected = transforms(file.convert("RGB"))
    torch.testing.assert_close(photographs[5][0], expected, rtol=0, atol=0.05)  # they round at other moments


def test_a_few_of_a_folder_are_of_all_classes(imagenette: Path) -> None:
    photographs = images("imagenette2-160", folder=imagenette, limit=10)
    assert sorted(photographs.labels.tolist()) == list(range(10))


def test_augmented_photographs_are_the_same_in_any_order_and_any_process(imagenette: Path) -> None:
    photographs = images("imagenette2-160", folder=imagenette, size=32, augment=True, dtype=torch.float64)
    whole, _ = photographs.batch(range(6))
    assert whole.dtype == torch.float64
    assert torch.equal(photographs.batch([4, 1])[0], whole[[4, 1]])
    loaded, _ = next(iter(DataLoader(photographs, batch_size=6, num_workers=1)))
    assert torch.equal(loaded, whole)
    photographs.set_epoch(1)
    assert not torch.equal(photographs[4][0], whole[4])


def test_any_set_in_the_layout_of_imagefolder_is_read_by_its_path(tmp_path: Path) -> None:
    for name in ("train/cat/a.png", "train/dog/b.jpg", "train/owl/c.jpeg", "test/owl/d.JPG"):
        picture(tmp_path / name)
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    train, test = images(tmp_path, size=16), images(str(tmp_path), "test", size=16)
    assert (train.classes, train.labels.tolist()) == (("cat", "dog", "owl"), [0, 1, 2])
    assert (test.classes, test.labels.tolist()) == (("cat", "dog", "owl"), [2])  # a label is the same in both splits
    picture(tmp_path / "test/elk/e.jpg")
    with pytest.raises(DataError, match=r"test has the class 'elk', which the train split lacks\.$"):
        images(tmp_path, "test")


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "train/cat/a.jpg")
    whole = (tmp_path / "train/cat/a.jpg").read_bytes()
    for content in (b"", b"not an image", whole[: len(whole) // 2]):
        (tmp_path / "train/cat/a.jpg").write_bytes(content)
        with pytest.raises(DataError, match=r"train/cat/a\.jpg can't be read as an image .*: restore or remove it\.$"):
            images(tmp_path).batch([0])


@pytest.fixture
def tiny_imagenet(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-imagenet-200"
    for seed, wnid in enumerate(("n02", "n01")):
        for i in range(3):
            picture(folder / f"train/{wnid}/images/{wnid}_{i}.JPEG", (64, 64), grey=i == 0, seed=seed)
        (folder / f"train/{wnid}/{wnid}_boxes.txt").write_text("")
    for i in range(2):
        picture(folder / f"val/images/val_{i}.JPEG", (64, 64), seed=i)
        picture(folder / f"test/images/test_{i}.JPEG", (64, 64))
    (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "words.txt").write_text("n00\tentity\nn01\tgoldfish, Carassius auratus\nn02\tsnail\n")
    return tmp_path


def test_tiny_imagenet_takes_its_test_split_from_val_annotations(tiny_imagenet: Path) -> None:
    train, test = (images("tiny-imagenet", split, folder=tiny_imagenet) for split in ("train", "test"))
    assert train.classes == test.classes == ("goldfish", "snail")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 0, 0, 1, 1, 1], [1, 0])
    assert train.batch([0, 1])[0].shape == (2, 3, 64, 64)
    assert isinstance(test, FolderImages)
    with Image.open(test.paths[1]) as file:  # nothing is resized or cut off
        pixels = torch.from_numpy(np.asarray(file.convert("RGB")).copy()).permute(2, 0, 1) / 255
    expected = (pixels - torch.tensor(IMAGENET_MEAN)[:, None, None]) / torch.tensor(IMAGENET_STD)[:, None, None]
    torch.testing.assert_close(test[1][0], expected)


def test_an_incomplete_tiny_imagenet_is_told_in_a_sentence(tiny_imagenet: Path) -> None:
    (tiny_imagenet / "tiny-imagenet-200/words.txt").unlink()
    with pytest.raises(DataError, match=r"is not Tiny ImageNet as it was unpacked .*words\.txt.*: unpack it again\.$"):
        images("tiny-imagenet", folder=tiny_imagenet)


# CIFAR-10


_PicklerInPython: Any = pickle._Pickler  # the one whose parts can be replaced


class _Python2Pickler(_PicklerInPython):  # type: ignore[misc]
    """Writes what Python 2 with numpy 1 wrote: all strings as 8-bit strings, arrays by numpy.core.multiarray."""

    dispatch: ClassVar[dict[type, Any]] = dict(_PicklerInPython.dispatch)

    def save_bytes(self, text: bytes) -> None:
        self.write(b"T" + len(text).to_bytes(4, "little") + text)
        self.memoize(text)

    def save_str(self, text: str) -> None:
        self.save_bytes(text.encode("latin-1"))

    dispatch[bytes], dispatch[str] = save_bytes, save_str


def python2_pickle(content: object) -> bytes:
    stream = io.BytesIO()
    _Python2Pickler(stream, protocol=2).dump(content)
    return stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Six files of four images each, pickled as the archive's are."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for number, name in enumerate(names):
        data = np.full((4, 3072), number, dtype=np.uint8)
        data[0] = np.arange(3072) % 251
        content = {b"data": data, b"labels": [number, 1, 2, 3], b"batch_label": b"x", b"filenames": [b"a"] * 4}
        (folder / name).write_bytes(python2_pickle(content))
    meta = {b"label_names": [f"class {i}".encode() for i in range(10)], b"num_vis": 3072}
    (folder / "batches.meta").write_bytes(python2_pickle(meta))
    return tmp_path


def test_cifar_10_is_read_from_its_pickles(cifar: Path) -> None:
    train, test = images("cifar-10", folder=cifar), images("cifar_10", "test", folder=cifar / "cifar-10-batches-py")
    assert isinstance(train, ImageSet)
    assert (train.images.shape, len(test)) == ((20, 3, 32, 32), 4)
    assert train.labels.tolist() == [0, 1, 2, 3, 1, 1, 2, 3, 2, 1, 2, 3, 3, 1, 2, 3, 4, 1, 2, 3]
    assert train.images[0, 2, 1, 5] == (2 * 1024 + 1 * 32 + 5) % 251  # planes, then rows
    assert train.classes[9] == "class 9"
    assert train.batch([0, 1])[0].isfinite().all()


def test_arrays_pickled_by_python_2_and_by_python_3_are_read(tmp_path: Path) -> None:
    content = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), b"labels": [3], b"name": b"caf\xe9"}
    old = python2_pickle(content)
    assert b"cnumpy.core.multiarray\n" in old and b"_codecs" not in old
    for pickled in (old, *(pickle.dumps(content, protocol) for protocol in (3, 4))):
        (tmp_path / "batch").write_bytes(pickled)
        found = read_arrays(tmp_path / "batch")
        assert (found[b"data"].tolist(), found[b"labels"], found[b"name"]) == ([[0, 1, 2], [3, 4, 5]], [3], b"caf\xe9")


class _Attack:
    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch hacked",), "system"),
        (eval, ("open('hacked', 'w')",), "builtins.eval"),
        (getattr, (int, "real"), "builtins.getattr"),
        (np.load, ("hacked",), "numpy.*load"),
        (open, ("hacked", "w"), "open"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    cifar: Path, monkeypatch: pytest.MonkeyPatch, function: Any, arguments: tuple[object, ...], name: str
) -> None:
    monkeypatch.chdir(cifar)
    attack = pickle.dumps({b"data": _Attack(function, *arguments), b"labels": []}, protocol=4)
    (cifar / "cifar-10-batches-py/data_batch_3").write_bytes(attack)
    with pytest.raises(DataError, match=rf"data_batch_3 was not loaded: it asks for \S*{name}, and only numpy arrays"):
        images("cifar-10", folder=cifar)
    assert not (cifar / "hacked").exists()


def test_damaged_or_foreign_files_of_cifar_are_told_in_a_sentence(cifar: Path) -> None:
    batch = cifar / "cifar-10-batches-py/test_batch"
    whole = batch.read_bytes()
    for content, sentence in (
        (whole[: len(whole) // 2], r"test_batch was not loaded: "),
        (b"", r"test_batch was not loaded: "),
        (pickle.dumps([1]), r"test_batch is not a file of CIFAR-10: it holds no dictionary\.$"),
        (
            pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}),
            r"are not those of CIFAR-10 \(KeyError\(b'labels'\)\)\.$",
        ),
        (pickle.dumps({b"data": np.zeros((2, 9), np.uint8), b"labels": [1]}), r"are not those of CIFAR-10 "),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}), r"hold 2 images but 1 labels\.$"),
    ):
        batch.write_bytes(content)
        with pytest.raises(DataError, match=sentence):
            images("cifar-10", "test", folder=cifar)
    batch.unlink()
    with pytest.raises(DataError, match=r"lacks the file .*test_batch: extract cifar-10-python\.tar\.gz again\.$"):
        images("cifar-10", "test", folder=cifar)


# What is asked for wrongly


@pytest.fixture
def nothing_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    yield


@pytest.mark.parametrize(
    ("arguments", "settings", "sentence"),
    [
        (("fashion-mnist", "valid"), {}, r"split must be 'train' or 'test', not 'valid'\.$"),
        ((), {"limit": 0}, r"limit must be at least 1, not 0: it is how many samples to keep\.$"),
        ((), {"size": 64}, r"fashion-mnist has images of 28 pixels a side: leave size=64 out\.$"),
        (("fashon-mnist",), {}, r"no data set named 'fashon-mnist'; known are .* Did you mean 'fashion-mnist'\?$"),
        (("imdb",), {}, r"imdb is a set of texts: open it with labkit\.data\.text\.$"),
        (("cifar-10",), {}, r"cifar-10 is not in .*; fetch it: labkit data fetch cifar-10\.$"),
        (
            ("cifar-10",),
            {"folder": "/nowhere"},
            r"There is no folder /nowhere: give the one that cifar-10 was unpacked to",
        ),
        (("cifar-10",), {"folder": data_folder()}, r"does not hold CIFAR-10, as there is no batches\.meta in it: give"),
        ((data_folder(),), {}, r"does not hold an image set, as there is no train in it: give"),
    ],
)
@pytest.mark.usefixtures("nothing_fetched")
def test_what_is_asked_for_wrongly_is_told_in_a_sentence(
    arguments: tuple[Any, ...], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((ValueError, DataError), match=sentence):
        images(*arguments, **settings)


def test_a_size_too_small_and_a_split_without_files_are_told_in_a_sentence(imagenette: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"size must be at least 8 pixels, not 4\.$"):
        images("imagenette2-160", folder=imagenette, size=4)
    picture(tmp_path / "train/cat/a.jpg")
    with pytest.raises(DataError, match=r"has no test split: there is no folder .*test\.$"):
        images(tmp_path, "test")
    (tmp_path / "test/cat").mkdir(parents=True)
    with pytest.raises(DataError, match=r"The test split in .* has no images: look into its folders\.$"):
        images(tmp_path, "test")
