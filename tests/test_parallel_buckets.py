"""Buckets: which gradients travel together, in which order, and exactly how many bytes and messages that is."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.collectives.formulas import all_reduce_sent
from labkit.parallel import DistributedDataParallel
from labkit.parallel.data_parallel.buckets import Bucket, assign
from labkit.ranks import Ranks
from labkit.record import Recorder
from labkit.verify import CASES

MB = 1 << 20


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param, timeout=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout=20) as ranks:
        yield ranks


def parameters(*counts, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(count, dtype=dtype)) for count in counts]


# --- filling ---


def test_a_bucket_is_closed_when_it_has_reached_its_cap():
    assert assign(parameters(10, 10, 10, 10), cap_bytes=80, first_cap_bytes=80) == [[0, 1], [2, 3]]
    assert assign(parameters(30, 10, 10, 10), cap_bytes=80, first_cap_bytes=80) == [[0], [1, 2], [3]]
    assert assign(parameters(1, 1, 1), cap_bytes=1e9, first_cap_bytes=1e9) == [[0, 1, 2]]
    assert assign(parameters(1, 1, 1), cap_bytes=1e-9, first_cap_bytes=1e-9) == [[0], [1], [2]]


def test_the_first_bucket_is_small_so_that_sending_starts_early():
    assert assign(parameters(10, 10, 10, 10, 10), cap_bytes=160, first_cap_bytes=40) == [[0], [1, 2, 3, 4]]


def test_a_bucket_holds_one_dtype_and_buckets_are_in_the_order_of_readiness():
    mixed = [*parameters(1), *parameters(1, dtype=torch.float64), *parameters(1), *parameters(1, dtype=torch.float64)]
    assert assign(mixed, cap_bytes=100, first_cap_bytes=100) == [[0, 2], [1, 3]]
    assert assign(mixed, cap_bytes=16, first_cap_bytes=16) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("elements", [3, 5000, 70000])
def test_a_gradient_is_divided_on_its_way_into_the_bucket_and_lives_there(elements):
    """Small ones together when the bucket is full, large ones at once."""
    first, second = parameters(elements, elements)
    bucket = Bucket([first, second])
    for step in (1, 2):  # a new gradient, then one that is there already
        for index, parameter in enumerate([first, second]):
            if step == 1:
                parameter.grad = torch.full((elements,), 6.0 + index)
            bucket.take(index, 3)
        assert bucket.waiting == 0
        bucket.close(3)
        bucket.forget()
        assert first.grad.eq(2.0 / 3 ** (step - 1)).all() or step == 2
        assert first.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        assert torch.equal(bucket.flat, torch.cat([first.grad, second.grad]))


# --- sending ---


def build(case):
    torch.manual_seed(0)
    chosen = CASES[case]
    return chosen.build(), chosen.batch()[0]


def four_steps(case, options):
    """The buckets' (elements, bytes an element) after the first step, and the record of each step."""
    module, inputs = build(case)
    wrapper = DistributedDataParallel(module, **options)
    records, sizes = [], []
    for _ in range(4):
        sizes.append([(bucket.flat.numel(), bucket.flat.element_size()) for bucket in wrapper._reducer.buckets])
        wrapper.zero_grad()
        with Recorder() as record:
            wrapper(inputs).sum().backward()
        records.append((record.bytes_by("operation"), record.messages_by("operation"), record.control_messages))
    return sizes, records


@pytest.mark.parametrize("case", ["image", "text", "tokens", "mixed dtypes", "frozen"])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.02}, {"algorithm": "tree", "overlap": False}], ids=str)
def test_bytes_and_messages_are_those_of_one_all_reduce_a_bucket(ranks, case, options):
    size, algorithm = ranks.world_size, options.get("algorithm", "ring")
    module, _ = build(case)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    count = sum(p.requires_grad for p in module.parameters())
    for rank, (sizes, records) in enumerate(ranks.run(four_steps, case, options)):
        for step, (buckets, (nbytes, messages, control)) in enumerate(zip(sizes, records, strict=True)):
            formulas = [all_reduce_sent(algorithm, *bucket, size) for bucket in buckets]
            assert sum(elements * itemsize for elements, itemsize in buckets) == trained
            assert nbytes.get("all_reduce", 0) == sum(one.bytes[rank] for one in formulas)
            assert messages.get("all_reduce", 0) == sum(one.messages[rank] for one in formulas)
            # the order of readiness, once: eight bytes a parameter from the first rank to the others, by a tree
            children = sum(rank + hop < size for hop in (2, 1) if rank % (2 * hop) == 0)
            assert nbytes.get("broadcast", 0) == (step == 0) * children * 8 * count
            # every collective is agreed on
            assert control == (len(buckets) + (step == 0)) * (size > 1)


def test_find_unused_costs_one_byte_a_parameter(two):
    _, records = two.run(four_steps, "text", {"find_unused_parameters": True})[0]
    _, plain = two.run(four_steps, "text", {})[0]
    count = len(list(build("text")[0].parameters()))
    for (nbytes, messages, _), (without, fewer, _) in zip(records[1:], plain[1:], strict=True):
        flags = all_reduce_sent("ring", count, 1, 2)
        assert nbytes["all_reduce"] - without["all_reduce"] == flags.bytes[0]
        assert messages["all_reduce"] - fewer["all_reduce"] == flags.messages[0]


def test_buffers_are_one_broadcast_a_step_whatever_their_dtypes(two):
    def run():
        module, inputs = build("batch norm")
        wrapper = DistributedDataParallel(module)
        wrapper(inputs).sum().backward()
        with Recorder() as record:
            with wrapper.no_sync():
                wrapper(inputs)
                wrapper(inputs)
            wrapper(inputs)
        return record.bytes_by("operation"), record.messages

    nbytes = sum(buffer.numel() * buffer.element_size() for buffer in build("batch norm")[0].buffers())
    assert two.run(run) == [({"broadcast": nbytes}, 1), ({}, 0)]


def test_buffers_that_are_replaced_or_added_later_are_broadcast_too(two):
    def run():
        module = nn.BatchNorm1d(2)
        wrapper = DistributedDataParallel(module)
        wrapper(torch.randn(3, 2)).sum().backward()
        module.running_mean = torch.full((2,), float(dist.get_rank()))
        module.register_buffer("late", torch.full((3,), dist.get_rank(), dtype=torch.int32))
        module.momentum = 0.0
        wrapper(torch.randn(3, 2))
        return module.running_mean.tolist(), module.late.tolist()

    assert two.run(run) == [([0.0, 0.0], [0, 0, 0])] * 2


class Backwards(nn.Module):
    """Layers are used in another order than they are defined in."""

    def __init__(self, order):
        super().__init__()
        self.layers, self.order = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(4)]), order

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x)
        return x


def test_buckets_are_rebuilt_once_in_the_order_in_which_gradients_were_ready(two):
    def run():
        module = Backwards([3, 1, 0, 2])
        wrapper = DistributedDataParallel(module, bucket_cap_mb=1e-6)
        names = {parameter: name for name, parameter in module.named_parameters()}
        seen = []
        for _ in range(3):
            seen.append([names[p][7] for bucket in wrapper._reducer.buckets for p in bucket.parameters])
            wrapper(torch.full((1, 8), float(dist.get_rank()))).sum().backward()
            # the gradients of the first backward move into the new buckets
            homes = {bucket.flat.untyped_storage().data_ptr() for bucket in wrapper._reducer.buckets}
            assert {p.grad.untyped_storage().data_ptr() for p in module.parameters()} == homes
            seen.append([module.layers[0].weight.grad.sum().item()])
        return seen

    first, other = two.run(run)
    assert first == other
    assert first[0] == list("3210") and first[2] == first[4] == list("2013")


def test_where_ranks_see_another_order_the_first_ranks_counts_for_all(two):
    def run():
        module = Backwards([3, 1, 0, 2] if dist.get_rank() == 0 else [0, 1, 2, 3])
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.eye_(parameter)
        wrapper = DistributedDataParallel(module, bucket_cap_mb=1e-6)
        names = {parameter: name for name, parameter in module.named_parameters()}
        for _ in range(2):
            wrapper.zero_grad()
            wrapper(torch.full((1, 8), dist.get_rank() + 1.0)).sum().backward()
        order = [names[p][7] for bucket in wrapper._reducer.buckets for p in bucket.parameters]
        return order, [parameter.grad[0, 0].item() for parameter in module.parameters()]

    assert two.run(run) == [(list("2013"), [1.5] * 4)] * 2


def test_buckets_are_sent_while_backward_still_computes(two):
    """What the hook of the first layer sees: the last layer's bucket is under way."""

    def run(overlap):
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        wrapper = DistributedDataParallel(module, bucket_cap_mb=1e-6, overlap=overlap)
        under_way = []
        module[0].weight.register_hook(
            lambda _: under_way.append([work is not None for work in wrapper._reducer.works])
        )
        for _ in range(2):
            wrapper(torch.ones(1, 8)).sum().backward()
        return under_way[1]

    assert two.run(run, True)[0] == [True] * 5
    assert two.run(run, False)[0] == [False] * 5


@pytest.mark.parametrize("cap", [1e-9, 1e9, float("inf")])
def test_any_size_of_bucket(two, cap):
    def run():
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        wrapper = DistributedDataParallel(module, bucket_cap_mb=cap)
        wrapper(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        return wrapper.bucket_bytes, module[1].bias.grad.item()

    assert two.run(run) == [([4] * 4 if cap < 1 else [16], 1.0)] * 2


def test_the_default_buckets_are_one_mebibyte_and_then_25():
    buckets = assign(parameters(*[MB // 8] * 120), cap_bytes=25 * MB, first_cap_bytes=MB)
    assert list(map(len, buckets)) == [2, 50, 50, 18]


def test_gradients_take_no_memory_besides_the_buckets(two):
    def run():
        module, inputs = build("image")
        wrapper = DistributedDataParallel(module)
        for _ in range(2):
            wrapper(inputs).sum().backward()
        held = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
        return held == {bucket.flat.untyped_storage().data_ptr() for bucket in wrapper._reducer.buckets}

    assert two.run(run) == [True, True]
