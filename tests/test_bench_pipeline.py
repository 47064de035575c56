"""The benchmark of pipelines compares equals, and its sleeping stages cost what the simulator is told."""

import pytest
import torch

from labkit.bench.pipeline_bench import WORKLOADS, bench_pipeline, predicted
from labkit.parallel.pipeline import KNOWN, split_model


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_passes_between_the_stages_is_as_large_as_is_said(name):
    workload, cuts = WORKLOADS[name]
    model, inputs, _ = workload()
    output = split_model(model, 2, cuts=cuts).module(0)(inputs[: len(inputs) // 8])
    vectors = output if isinstance(output, torch.Tensor) else output[0]
    assert vectors.numel() * 4 == {"small activations": 1 << 14, "large activations": 1 << 22}[name]


def test_it_prints_a_line_for_each_schedule_and_size_and_for_each_that_is_simulated(capsys):
    results = bench_pipeline(steps=1, warm_ups=0, cost=0.003)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 2 + len(KNOWN)
    assert "ratio" in lines[1] and "target of 0.9" in lines[1] and "simulated" in lines[-1]
    assert {f"{name}, {what}" for name in ("gpipe", "1f1b") for what in WORKLOADS} <= set(results)
    # sleeping takes its time, and one stage at a time takes the longest
    took = {name: results[f"{name}, asleep"] * predicted(name, 4, 0.003) for name in KNOWN}
    assert all(seconds >= 3 * 8 * 0.003 for seconds in took.values())
    assert took["naive"] > 1.5 * max(seconds for name, seconds in took.items() if name != "naive")
