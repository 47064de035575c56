"""Training with tensor parallelism, as the harness and the tests want it."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from labkit.models import resnet, transformer
from labkit.models.norms import find_norm
from labkit.models.residual import BottleneckBlock
from labkit.parallel import loss_parallel, parallelize_module
from labkit.parallel.tensor import full_grads, full_params, plan_for
from labkit.verify.awkward import continuations, documents, pictures

sgd = partial(torch.optim.SGD, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)
SEQUENCES = ("none", "gathered", "shards")


class Tensor:
    """A stepper: every rank takes the whole batch, and shows full gradients and parameters."""

    def __init__(self, module, loss, optimizer, *, plan=None, sharded=False, **options):
        self.module = parallelize_module(module, None, plan or plan_for(module, **options))
        self.loss, self.optimizer, self.sharded = loss, optimizer(module.parameters()), sharded

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        with loss_parallel() if self.sharded else nullcontext():
            total, weight = self.loss(self.module(inputs), targets)
        (total / weight).backward()
        self.grads = full_grads(self.module)
        self.optimizer.step()

    def full_grads(self):
        return self.grads

    def full_params(self):
        return full_params(self.module)


def heads_for(ranks):
    """Heads and width that the ranks divide."""
    return {"num_heads": 3, "d_model": 18} if ranks == 3 else {"num_heads": 4, "d_model": 16}


def classifier(ranks, length=12, **options):
    return transformer(
        vocab_size=11, num_layers=2, max_len=length, num_classes=5, d_ff=22, **heads_for(ranks), **options
    )


def predictor(ranks, length=12, **options):
    """Its vocabulary of 11 divides for no number of ranks."""
    return transformer(
        vocab_size=11, num_layers=2, max_len=length, causal=True, head="token", **heads_for(ranks), **options
    )


def images(depth, norm):
    return resnet(depth, num_classes=5, norm=norm)


def bottleneck(norm):
    """A network of one block of three convolutions."""
    block = BottleneckBlock(3, 16, 1, find_norm(norm))
    return nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5))


def bottleneck_plan():
    """As a ResNet-50 shares out each of its blocks."""
    plan = plan_for(resnet(50, num_classes=5))
    return {f"0.{name[9:]}": style for name, style in plan.items() if name.startswith("layer1.0.")}


document_batch = partial(documents, 4, length=12)
token_batch = partial(continuations, 4, length=12)
picture_batch = partial(pictures, 4)


class GroupedAttention(nn.Module):
    """Four query heads that share two key heads, as plain PyTorch has them."""

    def __init__(self, width=16, heads=4, groups=2):
        super().__init__()
        self.head_dim = width // heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, groups * self.head_dim) for _ in range(2))

    def forward(self, x):
        split = [p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*split, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)


def one_block(shape, ranks, sequence, dropout=0.0):
    """A network of one block, shared out, and the block; everything but the block stays as it is."""
    model = transformer(
        vocab_size=11, d_model=shape.d_model, num_layers=1, num_heads=shape.num_heads, max_len=shape.length,
        num_classes=5, dropout=dropout, d_ff=shape.d_ff,
    )  # fmt: skip
    plan = {name: style for name, style in plan_for(model, sequence=sequence).items() if name.startswith("blocks")}
    parallelize_module(model, None, plan)
    return model.blocks[0]


def block_input(shape, ranks, sequence):
    """What comes into the block on this rank, and which tokens are valid."""
    length = shape.length if sequence == "none" else shape.length // ranks
    x = torch.randn(shape.batch_size, length, shape.d_model, requires_grad=True)
    return x, torch.ones(shape.batch_size, shape.length, dtype=torch.bool)
