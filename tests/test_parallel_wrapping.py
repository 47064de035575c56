"""What wrapping does to a module, what it refuses, and what is left when the wrapper is gone."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.collectives.formulas import all_reduce_sent
from labkit.mesh import Placement, placement_of
from labkit.models import norms, resnet
from labkit.parallel import DistributedDataParallel
from labkit.parallel.data_parallel import is_wrapped
from labkit.ranks import RankError, Ranks
from labkit.record import Recorder
from labkit.verify import CASES


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param, timeout=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three():
    with Ranks(3, timeout=20) as ranks:
        yield ranks


def refused(ranks, words, function, *arguments, kind=None):
    """The function fails on the ranks with these words, in one line; returns the error."""
    with pytest.raises(RankError, match=words) as caught:
        ranks.run(function, *arguments)
    assert kind is None or caught.value.type == kind
    return str(caught.value)


def seeded(build, seed):
    torch.manual_seed(seed)
    return build()


def net():
    return CASES["batch norm"].build()


def picture():
    return torch.randn(4, 3, 8, 8)


def train_once(wrapper, *inputs):
    wrapper(*inputs).sum().backward()


# --- construction ---


def test_all_take_the_parameters_and_buffers_of_the_first_rank(ranks):
    def run():
        rank = dist.get_rank()
        module = seeded(net, rank)
        module[1].running_mean.fill_(rank)
        module[1].num_batches_tracked.fill_(10 + rank)
        DistributedDataParallel(module)
        return module.state_dict()

    states = ranks.run(run)
    assert states[0]["1.num_batches_tracked"] == 10 and states[0]["1.running_mean"].sum() == 0
    for state in states:
        for name, value in states[0].items():
            assert torch.equal(state[name], value)


def test_construction_sends_every_byte_of_the_model_once_to_each_other_rank(ranks):
    with Recorder() as record:
        ranks.run(lambda: DistributedDataParallel(net()) and None)
    nbytes = sum(value.numel() * value.element_size() for value in net().state_dict().values())
    assert sum(record.bytes_sent) == (ranks.world_size - 1) * nbytes
    assert sum(record.messages) == ranks.world_size - 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_models_that_differ_are_refused_and_the_first_difference_is_named(two, three, world_size):
    def build(last):
        odd = dist.get_rank() == dist.get_world_size() - 1
        DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, last if odd else 3)))

    words = (
        f"all ranks.*DistributedDataParallel: rank 0 has 1.weight, float32 \\[3, 4\\] but rank "
        f"{world_size - 1} has 1.weight, float32 \\[5, 4\\]: build the same model on every rank"
    )
    refused({2: two, 3: three}[world_size], words, build, 5)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Linear(4, 4, bias=False), "rank 0 has bias, float32 \\[4\\] but rank 1 has nothing more"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "rank 0 has weight, .* but rank 1 has 0.weight"),
        (lambda: nn.Linear(4, 4).double(), "rank 1 has weight, float64 \\[4, 4\\]"),
        (lambda: nn.Linear(4, 4).requires_grad_(True).train(), None),
    ],
)
def test_a_missing_renamed_or_converted_parameter_is_named(two, other, words):
    def build():
        DistributedDataParallel(nn.Linear(4, 4) if dist.get_rank() == 0 else other())

    if words is None:
        two.run(build)
    else:
        refused(two, words, build)


def test_a_parameter_that_is_frozen_on_one_rank_only_is_named(two):
    def build():
        module = nn.Linear(4, 4)
        module.bias.requires_grad_(dist.get_rank() == 0)
        DistributedDataParallel(module)

    refused(two, "rank 1 has bias, float32 \\[4\\] \\(frozen\\)", build)


def sparse_layer():
    return nn.Embedding(5, 3, sparse=True)


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (lambda: torch.ones(1), {}, "module is a Tensor; give an nn.Module"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), {}, "no parameter needs a gradient"),
        (nn.ReLU, {}, "no parameter needs a gradient"),
        (lambda: nn.LazyLinear(2), {}, "parameter weight has no shape yet; run one forward, then wrap"),
        (lambda: nn.Linear(2, 2, device="meta"), {}, "parameter weight is sparse or has no data"),
        (lambda: nn.Linear(2, 2), {"bucket_cap_mb": 0}, "bucket_cap_mb is 0; give megabytes above 0"),
        (lambda: nn.Linear(2, 2), {"bucket_cap_mb": "25"}, "bucket_cap_mb is '25'; give megabytes"),
        (lambda: nn.Linear(2, 2), {"bucket_cap_mb": float("nan")}, "bucket_cap_mb is nan"),
        (lambda: nn.Linear(2, 2), {"algorithm": "star"}, "algorithm 'star' is not known; give one of"),
    ],
)  # fmt: skip
def test_what_cant_be_wrapped_is_refused_in_a_sentence(two, build, options, words):
    refused(two, words, lambda: DistributedDataParallel(build(), **options))


def test_without_ranks_it_says_where_to_run():
    with pytest.raises(RuntimeError, match="there are no ranks here: run this with labkit.ranks.launch"):
        DistributedDataParallel(nn.Linear(2, 2))


@pytest.mark.parametrize("nested", ["itself", "inside", "torch's"])
def test_no_wrapper_inside_a_wrapper(two, nested):
    def wrap():
        module = nn.Linear(2, 2)
        inner = nn.parallel.DistributedDataParallel(module) if nested == "torch's" else DistributedDataParallel(module)
        DistributedDataParallel(nn.Sequential(inner) if nested == "inside" else inner)

    words = {"itself": "module.weight is wrapped already", "inside": "0.module.weight is wrapped already"}
    refused(two, words.get(nested, "in PyTorch's wrapper already; wrap its .module"), wrap)


def test_a_rank_that_is_not_in_the_group_is_told_so(two):
    def wrap():
        group = dist.new_group([0])
        DistributedDataParallel(nn.Linear(2, 2), process_group=group)

    refused(two, "rank 1.*this rank is not a member of the group", wrap)


# --- names, copies, marks ---


def test_a_checkpoint_has_the_models_own_names(two):
    def run():
        module = net()
        wrapper = DistributedDataParallel(module)
        state = wrapper.state_dict()
        assert list(state) == list(module.state_dict())
        other = net()
        other.load_state_dict(state)
        wrapper.load_state_dict(other.state_dict())
        larger = nn.ModuleDict({"body": wrapper, "head": nn.Linear(2, 2)})
        assert list(larger.state_dict()) == [f"body.{name}" for name in state] + ["head.weight", "head.bias"]
        larger.load_state_dict({name: torch.ones_like(value) for name, value in larger.state_dict().items()})
        assert all(parameter.eq(1).all() for parameter in module.parameters())
        return sorted(name for name, _ in wrapper.named_parameters()) == sorted(
            f"module.{name}" for name, _ in module.named_parameters()
        )

    assert two.run(run) == [True, True]


def test_nothing_is_left_when_the_wrapper_is_gone(two):
    def run():
        module = nn.Linear(3, 3)
        wrapper = DistributedDataParallel(module)
        train_once(wrapper, torch.ones(2, 3))
        marked = is_wrapped(module.weight), module.weight._post_accumulate_grad_hooks is not None
        gc.disable()
        del wrapper  # no cycle keeps it
        gc.enable()
        module.zero_grad()
        with Recorder() as record:
            train_once(module, torch.full((1, 3), float(dist.get_rank())))
        assert not is_wrapped(module.weight) and not module.weight._post_accumulate_grad_hooks
        assert placement_of(module.weight) == Placement.of(module.weight)
        DistributedDataParallel(module)  # and may be wrapped again
        return marked, module.weight.grad.sum().item(), record.messages

    assert two.run(run) == [((True, True), 0.0, 0), ((True, True), 9.0, 0)]


class Keeping(nn.Linear):
    """Keeps its last output, as models do whose attention is looked at later."""

    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


def test_a_module_that_keeps_its_output_does_not_keep_itself(two):
    def run():
        module = Keeping(2, 2)
        train_once(DistributedDataParallel(module), torch.ones(1, 2))
        seen = weakref.ref(module)
        del module
        gc.collect()
        return seen() is None

    assert two.run(run) == [True, True]


def test_placements_say_that_every_rank_holds_every_parameter(two):
    def run():
        module = CASES["frozen"].build()
        wrapper = DistributedDataParallel(module)
        held = {name: placement_of(p).replicated_over for name, p in module.named_parameters()}
        del wrapper
        return {name: [axis.ranks for axis in axes] for name, axes in held.items()}

    assert set(map(str, two.run(run)[0].values())) == {"[(0, 1)]"}


def test_a_deep_copy_averages_on_its_own_and_sends_nothing_to_be_made(two):
    """As torch.optim.swa_utils.AveragedModel makes one, on one rank if it likes."""

    def run():
        wrapper = DistributedDataParallel(seeded(lambda: nn.Linear(2, 2), 0)).eval()
        with Recorder() as record:
            other = copy.deepcopy(wrapper)
        assert other.module.weight is not wrapper.module.weight and not other.training
        train_once(other, torch.full((1, 2), float(dist.get_rank())))
        return record.messages, other.module.weight.grad.tolist(), wrapper.module.weight.grad

    assert two.run(run) == [(0, [[0.5, 0.5], [0.5, 0.5]], None)] * 2


def test_a_wrapper_is_not_saved_nor_sent(two):
    refused(two, "can't be saved or sent: take its state_dict", lambda: pickle.dumps(DistributedDataParallel(net())))


# --- changes after wrapping ---


def change(how):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    module[2].bias.requires_grad_(False)
    wrapper = DistributedDataParallel(module)
    train_once(wrapper, torch.ones(1, 3))
    how(module)
    train_once(wrapper, torch.ones(1, 3))


def replace_parameter(module):
    module[0].weight = nn.Parameter(torch.ones(3, 3))


def replace_module(module):
    module[2] = nn.Linear(3, 3)


def add_module(module):
    module.append(nn.Linear(3, 3))


def add_parameter(module):
    module[1].slope = nn.Parameter(torch.ones(1))


def remove_module(module):
    del module[2]


def unfreeze(module):
    module[2].bias.requires_grad_(True)


def freeze(module):
    module[0].weight.requires_grad_(False)


def convert(module):
    module.half()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (replace_parameter, "parameter 0.weight was replaced after wrapping"),
        (replace_module, "module 2 was replaced after wrapping"),
        (add_module, "module 3 was added after wrapping"),
        (add_parameter, "parameter 1.slope was added after wrapping"),
        (remove_module, "module 2 was removed after wrapping"),
        (unfreeze, "parameter 2.bias was frozen when the module was wrapped and is trained now"),
        (freeze, "parameter 0.weight was frozen after wrapping"),
    ],
)
def test_a_change_after_wrapping_is_refused_at_the_next_forward(two, how, words):
    refused(two, words, change, how)


def test_a_module_that_was_converted_after_wrapping_is_refused(two):
    def run():
        wrapper = DistributedDataParallel(nn.Linear(3, 3))
        wrapper.double()
        train_once(wrapper, torch.ones(1, 3, dtype=torch.float64))

    refused(two, "was converted to torch.float64 after wrapping: convert the module first", run)


def test_freezing_is_allowed_where_unused_parameters_are(two):
    def run():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        wrapper = DistributedDataParallel(module, find_unused_parameters=True)
        module[0].requires_grad_(False)
        train_once(wrapper, torch.full((1, 3), float(dist.get_rank())))
        return module[0].weight.grad, module[1].bias.grad.tolist()

    assert two.run(run) == [(None, [1.0, 1.0, 1.0])] * 2


def test_a_wrapper_from_before_a_restart_says_to_build_it_again(two):
    two.run_cell("""
import torch
from labkit.parallel import DistributedDataParallel
wrapper = DistributedDataParallel(torch.nn.Linear(2, 2))
""")
    with pytest.raises(RankError):
        two.run_cell("if rank == 0: 1 / 0\nfrom labkit.collectives import barrier\nbarrier()")
    with pytest.raises(RankError, match="built before the ranks were restarted: build it, and what uses it, again"):
        two.run_cell("wrapper(torch.ones(1, 2))")


# --- the norm of the models ---


def test_a_resnet_with_sync_norm_says_what_to_import(monkeypatch):
    with_sync = resnet(8, num_classes=2, norm="sync")
    assert {type(m).__name__ for m in with_sync.modules() if "Norm" in type(m).__name__} == {"SyncBatchNorm"}
    monkeypatch.delitem(norms._norms, "sync")
    with pytest.raises(ValueError, match="norm='sync' spans the ranks .*: write `import labkit.parallel` first.$"):
        resnet(8, num_classes=2, norm="sync")


def test_a_gradient_in_sparse_form_is_refused(two):
    def run():
        wrapper = DistributedDataParallel(sparse_layer())
        train_once(wrapper, torch.tensor([1]))

    refused(two, "the gradient of weight is sparse and can't be averaged: build the layer with sparse=False", run)


def test_a_buffer_of_no_element_and_a_parameter_of_none_are_no_trouble(two):
    def run():
        module = nn.Linear(2, 2)
        module.register_buffer("empty", torch.zeros(0))
        module.nothing = nn.Parameter(torch.zeros(0))
        wrapper = DistributedDataParallel(module, find_unused_parameters=True)
        train_once(wrapper, torch.full((1, 2), float(dist.get_rank())))
        return module.weight.grad.tolist()

    with Recorder() as record:
        assert two.run(run) == [[[0.5, 0.5], [0.5, 0.5]]] * 2
    assert record.bytes_by("operation")[0]["all_reduce"] == sum(
        all_reduce_sent("ring", *what, 2).bytes[0] for what in [(6, 4), (3, 1)]
    )
