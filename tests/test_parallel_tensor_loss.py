"""`loss_parallel` is F.cross_entropy of logits that no rank has whole."""

import pytest
import torch
import torch.nn.functional as F

from labkit.parallel import loss_parallel
from labkit.parallel.tensor import parallel_argmax
from labkit.precision import autocast
from labkit.ranks import RankError, Ranks

CLASSES = 11


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{}ranks".format)
def ranks(request):
    with Ranks(request.param, timeout=30) as ranks:
        yield ranks


def slice_of(logits, dim, size, rank):
    return logits.tensor_split(size, dim)[rank].clone().requires_grad_()


def compared(shape, options, scale=1.0, classes=CLASSES):
    """The differences of value and gradient from those of the whole logits, on this rank."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
    dim = 0 if len(shape) == 1 else 1
    target = torch.randint(classes, shape[:dim] + shape[dim + 1 :])
    if target.dim():
        target.view(-1)[0] = options.get("ignore_index", -100)
    if options.get("weight") is not None:
        options = {**options, "weight": torch.rand(classes, dtype=torch.float64)}
    true = F.cross_entropy(whole, target, **options)
    seed = torch.rand_like(true)
    true.backward(seed)
    mine = slice_of(whole.detach(), dim, size, rank)
    before = mine.detach().clone()
    with loss_parallel():
        ours = F.cross_entropy(mine, target, **options)
    ours.backward(seed)
    assert torch.equal(mine.detach(), before) and ours.shape == true.shape and ours.dtype == true.dtype
    expected = whole.grad.tensor_split(size, dim)[rank]
    return (ours - true).abs().max().item(), (mine.grad - expected).abs().max().item() if expected.numel() else 0.0


OPTIONS = [
    {},
    {"reduction": "sum", "ignore_index": 3},
    {"reduction": "none"},
    {"label_smoothing": 0.2},
    {"label_smoothing": 0.2, "weight": True, "ignore_index": -1},
    {"weight": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(7, CLASSES), (2, CLASSES, 3), (CLASSES,)], ids=str)
def test_value_and_gradient_are_those_of_the_whole_logits(ranks, shape, options):
    """11 classes divide for none of these numbers of ranks."""
    for errors in ranks.run(compared, shape, options):
        assert max(errors) < 1e-12


def test_large_logits_do_not_overflow_and_a_rank_may_have_no_class(ranks):
    for errors in ranks.run(compared, (5, 2), {}, 1e4, 2):
        assert max(errors) < 1e-9


def in_16_bits():
    torch.manual_seed(0)
    logits, target = torch.randn(6, 8), torch.arange(6)
    import torch.distributed as dist

    mine = logits.tensor_split(2, 1)[dist.get_rank()].bfloat16()
    with loss_parallel(), autocast("cpu"):
        cast = F.cross_entropy(mine, target)
    with loss_parallel():
        plain = F.cross_entropy(mine, target)
    return cast.dtype, plain.dtype, cast.item(), F.cross_entropy(logits.bfloat16().float(), target).item()


def test_under_autocast_it_is_computed_in_float32(two):
    for cast, plain, ours, true in two.run(in_16_bits):
        assert (cast, plain) == (torch.float32, torch.bfloat16) and ours == pytest.approx(true, rel=1e-6)


def wrong(case):
    logits, target, options = torch.randn(4, 5), torch.arange(4), {}
    if case == "outside":
        target = target + 8
    if case == "probabilities":
        target = torch.rand(4, 5)
    if case == "shape":
        target = torch.arange(3)
    if case == "weight":
        options = {"weight": torch.rand(5)}
    with loss_parallel():
        F.cross_entropy(logits, target, **options)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("outside", "target 10 is outside of the 10 classes of all ranks"),
        ("probabilities", "the targets are probabilities; give class numbers"),
        ("shape", r"logits \[4, 5\], classes in dim 1, need targets \[4\], not \[3\]"),
        ("weight", r"weight has shape \[5\]; give one for all classes, \[10\]"),
    ],
)
def test_what_can_not_be_is_told_in_a_sentence(two, case, words):
    with pytest.raises(RankError, match=words):
        two.run(wrong, case)


def argmaxes():
    import torch.distributed as dist

    torch.manual_seed(0)
    logits = torch.randint(4, (50, CLASSES)).float()  # with many equal ones
    mine = logits.tensor_split(dist.get_world_size(), 1)[dist.get_rank()]
    return torch.equal(parallel_argmax(mine), logits.argmax(-1))


def test_the_argmax_is_that_of_the_whole_logits(ranks):
    assert all(ranks.run(argmaxes))
