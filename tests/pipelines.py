"""Pipelines as the equivalence harness wants them, and awkward models in steps."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labkit.parallel.pipeline import (
    PipelineSchedule,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleNaive,
    ScheduleZBH1,
    split_model,
)
from labkit.parallel.pipeline.splitting import steps_of

WAYS = {
    "naive": ScheduleNaive,
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleZBH1,
}


class Do(nn.Module):
    """A step that calls a function, and may own modules that others have too."""

    def __init__(self, function, **owned):
        super().__init__()
        self.function = function
        for name, module in owned.items():
            self.add_module(name, module)

    def forward(self, value):
        return self.function(value)


def steps_of_awkward(module):
    """A model that is no sequence, as one by hand; None where it is one already."""
    kind = type(module).__name__
    if kind == "Tied":
        return [module.embedding, module.middle, nn.Tanh(), module.head]
    if kind == "Unused":
        return [module.first, nn.Tanh(), nn.Identity(), module.last]
    if kind == "Mixed":
        back = Do(lambda y: torch.tanh(y).to(module.last.weight.dtype))
        return [module.first, Do(torch.Tensor.double), module.exact, back, module.last]
    if kind == "SometimesUsed":

        def begin(x):
            return torch.tanh(module.first(x)), x[:, 0]

        def sometimes(pair):
            y, column = pair
            chosen = column > 5
            if chosen.any():
                y = y.index_add(0, chosen.nonzero()[:, 0], torch.tanh(module.sometimes(y[chosen])))
            return y

        return [Do(begin, first=module.first), Do(sometimes, part=module.sometimes), nn.Identity(), module.last]
    return None


class Pipelined:
    """A pipeline over all ranks, which shows gradients and parameters of all stages by original name."""

    def __init__(self, module, loss, optimizer, *, schedule="1f1b", micro_batches=4, chunks=1, **options):
        steps, count = steps_of_awkward(module), dist.get_world_size()
        if schedule == "interleaved":
            chunks = 2
        wanted = options.pop("split", {})
        if not wanted:
            steps = enough(steps or steps_of(module), count * chunks)
        self.split = split_model(module, count * chunks, sequence=steps, **wanted)
        mine = range(dist.get_rank(), count * chunks, count)
        kept = ("deferred_batch_norm", "checkpoint")
        stage_options = {name: options.pop(name) for name in kept if name in options}
        stages = [self.split.stage(index, "cpu", **stage_options) for index in mine]
        self.weight = options.pop("known_weight", None)
        mean = options.pop("loss_form", "sum") == "mean"
        way = partial(mean_of, loss) if mean else loss
        made = WAYS[schedule] if isinstance(schedule, str) else partial(PipelineSchedule, schedule=schedule)
        given = stages if schedule == "interleaved" or not isinstance(schedule, str) else stages[0]
        self.schedule = made(given, n_microbatches=micro_batches, loss_fn=way, weighted=not mean, **options)
        self.named, self.named_buffers = {}, {}
        for stage in mine:
            self.named |= self.split.parameters(stage)
            self.named_buffers |= self.split.buffers(stage)
        self.optimizer = optimizer(list(self.named.values()) or [nn.Parameter(torch.zeros(1))])

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        first, last = 0 in self.schedule.stages, self.schedule.num_stages - 1 in self.schedule.stages
        options = {"weight": float(self.weight(targets))} if self.weight else {}
        self.output = self.schedule.step(*([inputs] if first else []), target=targets if last else None, **options)
        self.optimizer.step()

    def full_grads(self):
        return {name: parameter.grad for name, parameter in gathered(self.named, grads=True).items()}

    def full_params(self):
        return gathered(self.named)

    def full_buffers(self):
        return gathered(self.named_buffers)


def mean_of(loss, output, target):
    total, weight = loss(output, target)
    return total / weight


def enough(steps, count):
    """The steps, with some that do nothing among them where there are too few: a stage may have no parameters."""
    steps = list(steps)
    while len(steps) < count:
        steps.insert(len(steps) // 2, nn.Identity())
    return steps


class _Shown:
    def __init__(self, grad):
        self.grad = grad


def gathered(mine, *, grads=False):
    """What all ranks have, by name: for tests, by PyTorch's own way to pass objects."""
    values = {name: (value.grad if grads else value.detach()) for name, value in mine.items()}
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, values)
    whole = {name: value for some in everyones for name, value in some.items()}
    return {name: _Shown(value) for name, value in whole.items()} if grads else whole
