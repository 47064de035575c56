"""`labkit bench precision` prints a line for each workload, with both ratios."""

import pytest
import torch
from torch import nn

from labkit.bench import precision_bench


def test_a_line_for_each_workload_names_the_ratio_its_control_and_float32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = nn.Linear(4, 2), torch.ones(3, 4), torch.tensor([0, 1, 0])
    monkeypatch.setattr(precision_bench, "workloads", lambda: {"image": small, "text": small})
    results = precision_bench.bench_precision(steps=2, warm_ups=1)
    first, *lines = capsys.readouterr().out.splitlines()
    assert "bfloat16" in first
    assert [line.split(":")[0] for line in lines] == ["precision image", "precision text"]
    assert all("the target of 1.05; two of PyTorch's" in line and "float32 takes" in line for line in lines)
    assert set(results) == {f"{name}{part}" for name in ("image", "text") for part in ("", " control", " float32")}


def test_a_step_runs_in_its_region() -> None:
    model, dtypes = nn.Linear(4, 2), []
    model.register_forward_hook(lambda _m, _i, output: dtypes.append(output.dtype))
    from labkit.precision import autocast

    precision_bench.training_step(model, torch.ones(3, 4), torch.tensor([0, 1, 0]), lambda: autocast("cpu"))()
    assert dtypes == [torch.bfloat16] and model.weight.grad is not None
