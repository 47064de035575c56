"""Small runs of `labkit train` on every workload, and what it means that two of them are the same."""

from typing import Any

import pytest
import torch

from labkit.train import TrainResult


def small_runs(*, limit: int, **settings: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings of an image, a text and a tokens run on `limit` samples. 9 and 17 samples a step don't divide them."""
    common = {"limit": limit, "test_limit": 21, "progress": "none", **settings}
    image = {"workload": "image", "norm": "group", "batch_size": 9, **common}
    text = {"workload": "text", "d_model": 16, "num_heads": 2, "max_len": 16, "batch_size": 17, "learning_rate": 0.01}
    text |= common
    return image, text, {**text, "workload": "tokens"}


def assert_close(one: TrainResult, other: TrainResult) -> None:
    """Losses and weights within 1e-9, for float64; every hit, and every sample of the test split, counted alike."""
    assert one.losses == pytest.approx(other.losses, abs=1e-9)
    assert one.accuracies == other.accuracies and one.samples == other.samples
    assert other.accuracy == one.accuracy and other.evaluations[-1].samples == one.evaluations[-1].samples
    assert list(other.state_dict) == list(one.state_dict)
    for name, value in one.state_dict.items():
        torch.testing.assert_close(other.state_dict[name], value, rtol=0, atol=1e-9)


def assert_identical(one: TrainResult, other: TrainResult) -> None:
    """Losses, evaluations and weights to the last bit."""
    assert one.losses == other.losses
    assert [each.loss for each in one.evaluations] == [each.loss for each in other.evaluations]
    assert one.state_dict.keys() == other.state_dict.keys()
    assert all(torch.equal(one.state_dict[name], value) for name, value in other.state_dict.items())
