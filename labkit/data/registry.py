"""The sets that labkit knows, each pinned: address, size and checksum of every file, licence, source, how it unpacks.

Where nothing is fetched the set is embedded: it comes with the repository, in `data/`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

from labkit.data.errors import DataError


@dataclass(frozen=True)
class RemoteFile:
    """One file to fetch: its address, its checksum as "sha256:..." or "md5:...", its size in bytes where published."""

    url: str
    digest: str
    size: int | None = None

    @property
    def name(self) -> str:
        """The last part of the address, the name under which the file is kept."""
        return PurePosixPath(urlsplit(self.url).path).name


@dataclass(frozen=True, kw_only=True)
class RegistryEntry:
    """One set. `files` is empty for an embedded set; `folder` is the folder within that `fetch` returns ("" for all).

    `archive` says that the files are archives (tar, tar.gz or zip) to unpack, `unpacked_limit` how many bytes they may
    unpack to. The limit only stops an archive that explodes; it is no measure of the set.
    """

    name: str
    kind: Literal["image", "text"]
    title: str
    licence: str
    source: str
    files: tuple[RemoteFile, ...] = ()
    archive: bool = True
    folder: str = ""
    unpacked_limit: int = 2 * 1024**3

    @property
    def embedded(self) -> bool:
        """Whether the set comes with the repository, so that nothing is fetched."""
        return not self.files

    @property
    def size(self) -> int | None:
        """Bytes to fetch, or None where the size of a file isn't published."""
        sizes = [file.size for file in self.files if file.size is not None]
        return sum(sizes) if len(sizes) == len(self.files) else None


_FASTAI = "https://s3.amazonaws.com/fast-ai-imageclas"
_AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/555590db4219b1243abb1918effd6a7425a2d75f/data/ag_news_csv"
_IMAGENET_TERMS = "ImageNet terms of access (research, non-commercial)"

_ENTRIES = (
    RegistryEntry(
        name="fashion-mnist",
        kind="image",
        title="Fashion-MNIST, 20,000 train and 4,000 test of its 28x28 grey photographs, 10 classes",
        licence="MIT",
        source="Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747; github.com/zalandoresearch/fashion-mnist",
    ),
    RegistryEntry(
        name="wordnet-topics",
        kind="text",
        title="WordNet 3.0 noun definitions by topic, 12 classes",
        licence="WordNet 3.0 licence",
        source="Princeton University, WordNet 3.0, wordnet.princeton.edu",
    ),
    RegistryEntry(
        name="imagenette2-160",
        kind="image",
        title="Imagenette 2, ten easy classes of ImageNet, shortest side 160 px",
        licence=f"Apache-2.0 for the selection; images: {_IMAGENET_TERMS}",
        source="github.com/fastai/imagenette",
        files=(
            RemoteFile(
                f"{_FASTAI}/imagenette2-160.tgz",
                "sha256:64d0c4859f35a461889e0147755a999a48b49bf38a7e0f9bd27003f10db02fe5",
                99_003_388,
            ),
        ),
        folder="imagenette2-160",
    ),
    RegistryEntry(
        name="imagenette2-320",
        kind="image",
        title="Imagenette 2, ten easy classes of ImageNet, shortest side 320 px",
        licence=f"Apache-2.0 for the selection; images: {_IMAGENET_TERMS}",
        source="github.com/fastai/imagenette",
        files=(
            RemoteFile(
                f"{_FASTAI}/imagenette2-320.tgz",
                "sha256:569b4497c98db6dd29f335d1f109cf315fe127053cedf69010d047f0188e158c",
                341_663_724,
            ),
        ),
        folder="imagenette2-320",
    ),
    RegistryEntry(
        name="cifar-10",
        kind="image",
        title="CIFAR-10, 60,000 colour photographs of 32x32, 10 classes, the version for Python",
        licence="none stated",
        source="Krizhevsky 2009, Learning Multiple Layers of Features; cs.toronto.edu/~kriz/cifar.html",
        files=(
            RemoteFile(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                170_498_071,
            ),
        ),
    ),
    RegistryEntry(
        name="tiny-imagenet",
        kind="image",
        title="Tiny ImageNet, 64x64, 200 classes of ImageNet",
        licence=_IMAGENET_TERMS,
        source="Stanford CS231n, cs231n.stanford.edu",
        files=(
            RemoteFile(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
                248_100_043,
            ),
        ),
        folder="tiny-imagenet-200",
    ),
    RegistryEntry(
        name="ag-news",
        kind="text",
        title="AG News, titles and descriptions of news, 4 classes, CSV",
        licence="AG's corpus of news articles: research, non-commercial",
        source="Zhang, Zhao, LeCun 2015, arXiv:1509.01626; files of github.com/mhjabreel/CharCnn_Keras",
        files=(
            RemoteFile(f"{_AG_NEWS}/train.csv", "md5:b1a00f826fdfbd249f79597b59e1dc12"),
            RemoteFile(f"{_AG_NEWS}/test.csv", "md5:d52ea96a97a2d943681189a97654912d", 1_857_427),
        ),
        archive=False,
    ),
    RegistryEntry(
        name="imdb",
        kind="text",
        title="Large Movie Review Dataset, 50,000 labelled reviews, 2 classes",
        licence="none stated; cite the paper",
        source="Maas et al. 2011, aclanthology.org/P11-1015; ai.stanford.edu/~amaas/data/sentiment",
        files=(
            RemoteFile(
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                "sha256:c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
                84_125_825,
            ),
        ),
        folder="aclImdb",
    ),
    RegistryEntry(
        name="20-newsgroups",
        kind="text",
        title="20 Newsgroups, split by date, 20 classes",
        licence="none stated",
        source="qwone.com/~jason/20Newsgroups",
        files=(
            RemoteFile(
                "http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz",
                "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
            ),
        ),
    ),
)

REGISTRY: Mapping[str, RegistryEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def lookup(name: str) -> RegistryEntry:
    """The entry of that name. Capitals, hyphens and underscores don't matter: "AG_News" is "ag-news".

    Raises `DataError` with the known names, and the nearest one, for a name that isn't known.
    """
    plain = {_plain(known): entry for known, entry in REGISTRY.items()}
    if _plain(name) in plain:
        return plain[_plain(name)]
    nearest = difflib.get_close_matches(_plain(name), plain, n=1)
    hint = f" Did you mean {plain[nearest[0]].name!r}?" if nearest else ""
    raise DataError(f"There is no data set named {name!r}; known are {', '.join(REGISTRY)}.{hint}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
