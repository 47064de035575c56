"""Checkpoints under DistributedDataParallel: the same averages to the last bit, in both forms."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.memory import checkpoint_blocks
from labkit.models import resnet, transformer
from labkit.parallel import DistributedDataParallel
from labkit.ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, timeout=60) as ranks:
        yield ranks


def text():
    model = transformer(vocab_size=50, d_model=32, num_layers=3, num_heads=2, max_len=8, num_classes=5, dropout=0.2)
    return model, torch.randint(50, (4, 8)), torch.randint(5, (4,))


def image():
    return resnet(8, num_classes=10), torch.randn(4, 3, 16, 16), torch.randint(10, (4,))


def steps(workload, policy, use_reentrant):
    """Gradients and buffers after three steps, the last two accumulated."""
    torch.manual_seed(0)
    model, _, _ = workload()
    torch.manual_seed(1 + dist.get_rank())
    _, inputs, targets = workload()
    if policy is not None:
        checkpoint_blocks(model, policy, use_reentrant=use_reentrant)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(3):
        with wrapped.no_sync() if number == 1 else torch.enable_grad():
            F.cross_entropy(wrapped(inputs), targets).backward()
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()
    found = [p.grad for p in model.parameters()] + list(model.buffers())
    return copy.deepcopy([tensor.detach() for tensor in found])


@pytest.mark.parametrize("workload", [text, image])
def test_averages_are_the_same_to_the_last_bit(ranks, workload):
    wanted = ranks.run(steps, workload, None, False)
    assert any(tensor.abs().sum() for tensor in wanted[0])
    for policy, use_reentrant in ((1, False), (2, False), ("selective", False), (1, True), (2, True)):
        found = ranks.run(steps, workload, policy, use_reentrant)
        for mine, theirs in zip(found, wanted, strict=True):
            assert all(map(torch.equal, mine, theirs)), (policy, use_reentrant)
