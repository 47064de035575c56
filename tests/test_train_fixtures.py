"""Training on real photographs and real news, where they lie: in the folder that LABKIT_FIXTURES names."""

import os
import tarfile
from pathlib import Path

import pytest

from labkit.train import TrainConfig, train


@pytest.fixture(scope="module")
def fixtures():
    named = os.environ.get("LABKIT_FIXTURES")
    if not named or not Path(named).is_dir():
        pytest.skip("LABKIT_FIXTURES names no folder with an Imagenette archive and AG News")
    return Path(named)


@pytest.fixture(scope="module")
def imagenette(fixtures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imagenette")
    with tarfile.open(fixtures / "imagenette2-160-mini.tgz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("dp", [1, 2])
def test_imagenette_trains(imagenette, dp):
    config = TrainConfig(
        data="imagenette2-160", data_folder=str(imagenette), image_size=32, limit=200, test_limit=50,
        batch_size=20, epochs=3, learning_rate=3e-3, dp=dp, progress="none",
    )  # fmt: skip
    result = train(config)
    assert result.step == 30 and result.evaluations[-1].samples == 50
    assert result.accuracy > 0.15 and result.losses[-1] < 2.2 < result.losses[0]  # ten classes: by chance 0.1, 2.3


@pytest.mark.parametrize("dp", [1, 2])
def test_ag_news_trains(fixtures, dp):
    config = TrainConfig(
        workload="text", data="ag_news", data_folder=str(fixtures / "ag_news"), d_model=32, max_len=32, limit=3000,
        test_limit=400, batch_size=50, epochs=2, learning_rate=3e-3, dp=dp, progress="none",
    )  # fmt: skip
    result = train(config)
    assert result.evaluations[-1].samples == 400
    assert result.accuracy > 0.45  # four classes


def test_the_news_as_a_stream_of_tokens_trains(fixtures):
    config = TrainConfig(
        workload="tokens", data="ag_news", data_folder=str(fixtures / "ag_news"), d_model=32, max_len=32, limit=300,
        test_limit=30, batch_size=16, steps=30, learning_rate=3e-3, progress="none",
    )  # fmt: skip
    result = train(config)
    assert result.losses[-1] < result.losses[0] - 1
