"""`labkit bench checkpoint` times ours and PyTorch's on the same work, and prints a line for each comparison."""

import torch

from labkit.bench import checkpoint_bench
from labkit.models import resnet, transformer


def small_image():
    return resnet(8, num_classes=10), torch.randn(2, 3, 8, 8), torch.randint(10, (2,))


def small_text():
    model = transformer(vocab_size=20, d_model=16, num_layers=2, num_heads=2, max_len=8, causal=True, head="token")
    return model, torch.randint(20, (2, 8)), torch.randint(20, (2, 8))


def test_each_comparison_has_its_line_and_its_ratio(monkeypatch, capsys):
    monkeypatch.setattr(checkpoint_bench, "image_workload", small_image)
    monkeypatch.setattr(checkpoint_bench, "text_workload", small_text)
    ratios = checkpoint_bench.bench_checkpoint(steps=2, warm_ups=1)
    printed = capsys.readouterr().out
    assert printed.count("the target of 1") == 2 and printed.count("two of PyTorch's") == 5
    assert {"resnet18", "transformer", "transformer reentrant", "overhead", "resnet18 over none"} <= ratios.keys()
    assert all(ratio > 0 for ratio in ratios.values())


def test_ours_and_theirs_learn_the_same():
    def gradients(wrap):
        torch.manual_seed(0)
        model, inputs, targets = small_text()
        torch.nn.functional.cross_entropy(wrap(model)(inputs).flatten(0, 1), targets.flatten()).backward()
        return [p.grad for p in model.parameters()]

    wanted = gradients(checkpoint_bench.plain)
    for wrap in (checkpoint_bench.ours, checkpoint_bench.theirs, checkpoint_bench.selective):
        assert all(map(torch.equal, wanted, gradients(wrap)))
