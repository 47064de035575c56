"""The benchmark of the loop compares equals: both loops train on the same batches and have the same losses."""

from itertools import islice

import pytest

from labkit.bench.train_bench import IMAGE, TEXT, bench_train, our_loop, plain_loop


@pytest.mark.parametrize("config", [IMAGE, TEXT], ids=["image", "text"])
def test_the_plain_loop_has_the_losses_of_ours(config):
    assert list(islice(our_loop(config), 4)) == pytest.approx(list(islice(plain_loop(config), 4)), abs=1e-4)


def test_it_prints_a_line_a_workload_with_ratio_and_control(capsys):
    results = bench_train(steps=4, warm_ups=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["train", "train image", "train text"]
    assert set(results) == {"image", "image control", "text", "text control"}
    assert f"ratio {results['text']:.3f}" in lines[2]
