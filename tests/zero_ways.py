"""Training by every stage of ZeRO, and by data parallel, as the harness and the tests of ZeRO want it."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labkit.collectives import all_reduce, broadcast
from labkit.parallel import DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard
from labkit.parallel.zero import full_grads, full_params
from labkit.verify.splitting import even_sizes, split

sgd = partial(torch.optim.SGD, lr=0.01)
momentum = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=0.01)


def inner_units(module):
    """What to make units of: the blocks, in a network that has some; layers else."""
    blocks = getattr(module, "blocks", None)
    if blocks is None and hasattr(module, "layer1"):
        blocks = [block for name in module._stage_names for block in module.get_submodule(name)]
    if blocks is not None:
        return list(blocks)
    tied = len(list(module.parameters())) < len(list(module.named_parameters(remove_duplicate=False)))
    # a unit is used by all ranks or by none
    layers = [one for name, one in module.named_children() if name != "sometimes" and list(one.parameters())]
    return [] if tied else layers[1:]


def shard(module, *, nested=True, **options):
    for one in inner_units(module) if nested else ():
        fully_shard(one, **options)
    return fully_shard(module, **options)


def prepared(module, optimizer, stage, *, unused=False, algorithm="ring", **options):
    """The network to call, and its optimizer, by stage: 0 is data parallel."""
    common = {"find_unused_parameters": unused, "algorithm": algorithm, **options}
    if stage == 0:
        network = DistributedDataParallel(module, broadcast_buffers=False, **common)
        return network, optimizer(module.parameters())
    if stage == 3:
        network = shard(module, **common)
        return network, optimizer(network.parameters())
    kind, settings = optimizer.func, optimizer.keywords
    return module, ZeroRedundancyOptimizer(module.parameters(), kind, stage=stage, **settings, **common)


def no_sync(network, optimizer):
    return (network if hasattr(network, "no_sync") else optimizer).no_sync()


class Zero:
    """One stage as a stepper. `parts` micro-batches, all but the last `outside` of them under `no_sync`."""

    def __init__(self, module, loss, optimizer, *, stage, parts=1, outside=1, **options):
        for buffer in module.buffers():
            broadcast(buffer, 0)
        self.module, self.loss, self.parts, self.outside = module, loss, parts, outside
        self.network, self.optimizer = prepared(module, optimizer, stage, **options)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def step(self, inputs, targets):
        for buffer in self.module.buffers():
            broadcast(buffer, 0)
        self.optimizer.zero_grad()
        inputs, targets = (split(value, even_sizes(len(value), self.size))[self.rank] for value in (inputs, targets))
        weight = torch.tensor(float((targets != -100).sum()), dtype=torch.float64)
        all_reduce(weight)
        sizes = even_sizes(len(inputs), self.parts)
        micro = list(zip(split(inputs, sizes), split(targets, sizes), strict=True))
        for number, (some, wanted) in enumerate(micro):
            if number < self.parts - self.outside:
                with no_sync(self.network, self.optimizer):
                    self.backward(some, wanted, weight)
            else:
                self.backward(some, wanted, weight)
        self.grads = {name: None if grad is None else grad.clone() for name, grad in full_grads(self.module).items()}
        self.optimizer.step()

    def backward(self, inputs, targets, weight):
        (self.loss(self.network(inputs), targets)[0] * (self.size / weight.item())).backward()

    def full_grads(self):
        return self.grads

    def full_params(self):
        return full_params(self.module)

    def full_buffers(self):
        return dict(self.module.named_buffers())


def trained(case, optimizer, stage, steps, **options):
    """The weights on this rank after some steps, whole."""
    torch.manual_seed(0)
    module = case.build()
    stepper = Zero(module, case.loss, optimizer, stage=stage, unused=case.unused, **options)
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        stepper.step(*case.batch())
    return {name: value.clone() for name, value in full_params(module).items()}


def wide(width=64, layers=3):
    """Layers whose sizes are multiples of what a tensor is aligned to."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
