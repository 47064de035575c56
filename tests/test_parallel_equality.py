"""Training with DistributedDataParallel is training in one process: on every awkward model, at every world size."""

from functools import partial

import pytest
import torch
from torch import nn

from labkit.parallel import DistributedDataParallel
from labkit.ranks import Ranks
from labkit.verify import CASES, NotEquivalentError, assert_equivalent
from labkit.verify.splitting import even_sizes, split

sgd = partial(torch.optim.SGD, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


def wrapped(module, loss, optimizer, **options):
    return DistributedDataParallel(module, **options)


def equivalent(ranks, case, way=None, optimizer=sgd, dtype=torch.float32, **options):
    chosen = CASES[case]
    way = way or partial(wrapped, find_unused_parameters=chosen.unused)
    return assert_equivalent(
        chosen.build, chosen.batch(), chosen.loss, way, ranks.world_size, optimizer,
        dtype=dtype, ranks=ranks, **({"reference": chosen.reference} | options),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gradients_weights_and_buffers_equal_one_process(ranks, case):
    assert equivalent(ranks, case, start="rank0").identical
    assert equivalent(ranks, case, optimizer=adamw, dtype=torch.float64, start="rank0").identical


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 1e-3}, {"overlap": False}, {"algorithm": "tree"}], ids=str)
def test_however_it_is_sent(ranks, options):
    equivalent(ranks, "tokens", partial(wrapped, **options), dtype=torch.float64)


@pytest.mark.parametrize("case", ["image", "tokens"])
def test_fifty_steps_stay_together(two, case):
    assert equivalent(two, case, dtype=torch.float64, steps=50).errors["weights"] < 1e-10


@pytest.mark.parametrize("shares", [[3, 2], [4, 1], [5, 0]], ids=str)
def test_a_mean_over_unequal_shares_is_weighted_rightly(two, shares):
    equivalent(two, "uneven", shares=shares, dtype=torch.float64)


@pytest.mark.parametrize("norm", ["group", "sync"])
def test_a_resnet_on_unequal_shares_equals_the_whole_batch(ranks, norm):
    """With norm="sync" the statistics, too, are those of the whole batch."""
    chosen = CASES["image"]
    build = partial(small_resnet, norm)
    equal = partial(assert_equivalent, build, chosen.batch(), chosen.loss, wrapped, ranks.world_size, ranks=ranks)
    shares = [8 - (ranks.world_size - 1), *[1] * (ranks.world_size - 1)]
    equal(optimizer=sgd, dtype=torch.float64, shares=shares)


def small_resnet(norm):
    import labkit.parallel  # noqa: F401  # where "sync" comes from
    from labkit.models import resnet

    return resnet(8, num_classes=5, norm=norm)


class Accumulating:
    """Micro-batches under `no_sync`, the last of them outside."""

    def __init__(self, module, loss, optimizer, *, outside=1, **options):
        self.wrapper, self.loss, self.outside = DistributedDataParallel(module, **options), loss, outside
        self.optimizer = optimizer(self.wrapper.parameters())

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        end = self.wrapper._end
        mine = [split(value, even_sizes(len(value), end.size))[end.place] for value in (inputs, targets)]
        parts = [split(value, even_sizes(len(value), 3)) for value in mine]
        scale = end.size / float(self.loss(torch.zeros(*targets.shape, 11), targets)[1])
        for number, (some, wanted) in enumerate(zip(*parts, strict=True)):
            if number < 3 - self.outside:
                with self.wrapper.no_sync():
                    total = self.loss(self.wrapper(some), wanted)[0]
                (total * scale).backward()
            else:
                (self.loss(self.wrapper(some), wanted)[0] * scale).backward()
        self.optimizer.step()

    def full_grads(self):
        return {name: parameter.grad for name, parameter in self.wrapper.module.named_parameters()}

    def full_params(self):
        return dict(self.wrapper.module.named_parameters())

    def full_buffers(self):
        return dict(self.wrapper.module.named_buffers())


@pytest.mark.parametrize(
    ("case", "outside"),
    [("plain", 1), ("tied", 1), ("batch norm", 1), ("dropout", 1), ("unused on one", 1), ("tied", 2), ("dropout", 2)],
)
def test_accumulated_micro_batches_equal_one_backward(two, case, outside):
    """Also where the last two reduce, so that a gradient which is a mean already is added to and averaged again."""
    way = partial(Accumulating, outside=outside, find_unused_parameters=CASES[case].unused)
    equivalent(two, case, way, dtype=torch.float64, micro_batches=3)


def test_what_is_averaged_wrongly_is_noticed(two):
    """The tests above can fail: PyTorch's rule of a mean loss a rank is refused by the same harness."""
    with pytest.raises(NotEquivalentError, match="mean of the ranks' means"):
        equivalent(two, "uneven", partial(MeanOfMeans, wrapper=DistributedDataParallel))


class MeanOfMeans:
    """As PyTorch's tutorials train: the loss is the mean over the rank's own samples."""

    def __init__(self, module, loss, optimizer, *, wrapper):
        self.wrapper, self.loss = wrapper(module), loss
        self.optimizer = optimizer(self.wrapper.parameters())

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        inputs, targets = (split(value, even_sizes(len(value), size))[rank] for value in (inputs, targets))
        total, weight = self.loss(self.wrapper(inputs), targets)
        (total / weight).backward()
        self.optimizer.step()

    def full_grads(self):
        return {name: parameter.grad for name, parameter in self.wrapper.module.named_parameters()}

    def full_params(self):
        return dict(self.wrapper.module.named_parameters())


@pytest.mark.parametrize(("case", "told"), [("uneven", "3, 2"), ("tied", "10, 23")])
def test_pytorchs_wrapper_with_mean_losses_is_wrong_where_shares_weigh_differently(two, case, told):
    """On 3 and 2 samples, and on ranks with different numbers of valid tokens."""
    way = partial(MeanOfMeans, wrapper=nn.parallel.DistributedDataParallel)
    with pytest.raises(NotEquivalentError, match=f"ranks with {told} samples or tokens count alike"):
        equivalent(two, case, way)
    equivalent(two, case, lambda module, *_: nn.parallel.DistributedDataParallel(module))  # by the rule of the house
