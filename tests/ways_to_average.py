"""Data parallelism as small as it goes, once right, then wrong in every known way, for the harness's tests."""

import torch
import torch.distributed as dist

from labkit.collectives import ReduceOp, all_reduce, broadcast
from labkit.verify.splitting import even_sizes, split


class Right:
    """Averages gradients after backward, one all-reduce each; parameters and buffers come from rank 0."""

    def __init__(self, module, loss, optimizer):
        self.module, self.loss = module, loss
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.spread()
        self.optimizer = optimizer(module.parameters())

    def spread(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            broadcast(tensor.detach(), 0)

    def share(self, value):
        return split(value, even_sizes(len(value), self.size))[self.rank]

    def scale(self, weight):
        everyones = torch.tensor(float(weight), dtype=torch.float64)
        all_reduce(everyones)
        return self.size / everyones.item()

    def backward(self, inputs, targets):
        total, weight = self.loss(self.module(inputs), targets)
        (total * self.scale(weight)).backward()

    def synchronise(self):
        for parameter in self.module.parameters():
            # every rank asks, so that one without gradient sends zeros where another has some
            used = torch.tensor(float(parameter.grad is not None))
            all_reduce(used)
            if used.item() > 0:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                all_reduce(parameter.grad, ReduceOp.AVG)

    def step(self, inputs, targets):
        for buffer in self.module.buffers():
            broadcast(buffer, 0)
        self.optimizer.zero_grad()
        self.backward(self.share(inputs), self.share(targets))
        self.synchronise()
        self.optimizer.step()

    def full_grads(self):
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}

    def full_params(self):
        return dict(self.module.named_parameters())

    def full_buffers(self):
        return dict(self.module.named_buffers())


class Sums(Right):
    def synchronise(self):
        for parameter in self.module.parameters():
            all_reduce(parameter.grad)


class DividesTwice(Right):
    def scale(self, weight):
        return super().scale(weight) / self.size


class ForgetsTheWeight(Right):
    def scale(self, weight):
        return 1.0


class MeanOfMeans(Right):
    def scale(self, weight):
        return 1 / float(weight)


class NeverSynchronises(Right):
    def synchronise(self):
        pass


class OnlyTheFirst(Right):
    def synchronise(self):
        all_reduce(next(self.module.parameters()).grad, ReduceOp.AVG)


class AveragesParameters(Right):
    """The popular hook: it averages the parameters during backward, and leaves the gradients alone."""

    def synchronise(self):
        for parameter in self.module.parameters():
            all_reduce(parameter.detach(), ReduceOp.AVG)


class AveragesParametersAfterwards(NeverSynchronises):
    def step(self, inputs, targets):
        super().step(inputs, targets)
        for parameter in self.module.parameters():
            all_reduce(parameter.detach(), ReduceOp.AVG)


class BroadcastsRank0(Right):
    def synchronise(self):
        for parameter in self.module.parameters():
            broadcast(parameter.grad, 0)


class LeavesOutRank1(Right):
    def synchronise(self):
        for parameter in self.module.parameters():
            if self.rank == 1:
                parameter.grad.zero_()
            all_reduce(parameter.grad, ReduceOp.AVG)


class InMicroBatches(Right):
    """Right with any number of micro-batches: the weights are known before the first of them."""

    count = 2

    def parts(self, value):
        return split(value, even_sizes(len(value), self.count))

    def backward(self, inputs, targets):
        scale = self.scale(len(targets))
        for some, wanted in zip(self.parts(inputs), self.parts(targets), strict=True):
            (self.loss(self.module(some), wanted)[0] * scale).backward()


class ForgetsToDivideByMicroBatches(InMicroBatches):
    count = 4

    def backward(self, inputs, targets):
        for some, wanted in zip(self.parts(inputs), self.parts(targets), strict=True):
            total, weight = self.loss(self.module(some), wanted)
            (total * self.scale(weight)).backward()


class MeanOfMicroBatchMeans(InMicroBatches):
    count = 3

    def backward(self, inputs, targets):
        for some, wanted in zip(self.parts(inputs), self.parts(targets), strict=True):
            (self.loss(self.module(some), wanted)[0] / len(wanted) / self.count).backward()


class OnlyTheLastMicroBatch(InMicroBatches):
    def backward(self, inputs, targets):
        scale = self.scale(len(targets))
        for some, wanted in zip(self.parts(inputs), self.parts(targets), strict=True):
            self.optimizer.zero_grad()
            (self.loss(self.module(some), wanted)[0] * scale).backward()


class SynchronisesTheLastMicroBatch(InMicroBatches):
    """A hook that is armed for the last micro-batch only, and sees only that one's gradient."""

    def backward(self, inputs, targets):
        scale, early = self.scale(len(targets)), {}
        for i, (some, wanted) in enumerate(zip(self.parts(inputs), self.parts(targets), strict=True)):
            if i == self.count - 1:
                early = {name: parameter.grad.clone() for name, parameter in self.module.named_parameters()}
                self.optimizer.zero_grad()
            (self.loss(self.module(some), wanted)[0] * scale).backward()
        super().synchronise()
        for name, parameter in self.module.named_parameters():
            parameter.grad.add_(early[name])

    def synchronise(self):
        pass


class ForgetsZeroGrad(Right):
    def step(self, inputs, targets):
        before = [parameter.grad for parameter in self.module.parameters()]
        self.optimizer.zero_grad()
        self.backward(self.share(inputs), self.share(targets))
        self.synchronise()
        for parameter, kept in zip(self.module.parameters(), before, strict=True):
            if kept is not None:
                parameter.grad.add_(kept)
        self.optimizer.step()


class CrossesData(Right):
    """Inputs of one rank, targets of the next."""

    def step(self, inputs, targets):
        super().step(inputs, targets.roll(len(targets) // self.size))


class SwapsShards(Right):
    """Keeps each gradient as a shard a rank, and gathers the shards in the wrong order."""

    def full_grads(self):
        return {name: self.swapped(grad) for name, grad in super().full_grads().items()}

    def swapped(self, value):
        parts = value.flatten().split(even_sizes(value.numel(), self.size))
        return torch.cat(parts[::-1]).view(value.shape) if len({len(part) for part in parts}) == 1 else value


class NeverSteps(Right):
    def step(self, inputs, targets):
        self.optimizer.step = lambda: None
        super().step(inputs, targets)


class StepsFrozen(Right):
    def step(self, inputs, targets):
        super().step(inputs, targets)
        with torch.no_grad():
            for parameter in self.module.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(0.9)


class StepsDifferentlyOnRank1(Right):
    def __init__(self, module, loss, optimizer):
        super().__init__(module, loss, optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 + self.rank


class KeepsItsBuffers(Right):
    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        self.backward(self.share(inputs), self.share(targets))
        self.synchronise()
        self.optimizer.step()


class StartsAsItIs(Right):
    def spread(self):
        pass


class SpreadsParametersOnly(KeepsItsBuffers):
    def spread(self):
        for parameter in self.module.parameters():
            broadcast(parameter.detach(), 0)


class LosesAGradient(Right):
    def full_grads(self):
        return super().full_grads() | {"0.weight": None}


class FillsUnused(Right):
    def full_grads(self):
        grads = super().full_grads()
        return {name: torch.ones(1) if grad is None else grad for name, grad in grads.items()}


class ShowsAShard(Right):
    def full_params(self):
        return {name: value[: max(1, len(value) // 2)] for name, value in super().full_params().items()}


class HidesAParameter(Right):
    def full_params(self):
        return {name: value for name, value in super().full_params().items() if name != "0.bias"}


class AddsTheTiedOnce(Right):
    """Counts only what the embedding's use of the tied matrix gives, not the head's."""

    def backward(self, inputs, targets):
        weight = self.module.head.weight
        del self.module.head._parameters["weight"]
        self.module.head.weight = weight.detach()
        super().backward(inputs, targets)
        del self.module.head.weight
        self.module.head.weight = weight


class AddsNoise(Right):
    """A mistake that nobody knows."""

    def full_grads(self):
        torch.manual_seed(1)
        return {name: grad + torch.rand(grad.shape) for name, grad in super().full_grads().items()}
