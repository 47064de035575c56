"""Plans that don't fit are refused in a sentence; what a plan does can be taken back, clipped, drawn and saved."""

import copy
from functools import partial

import pytest
import torch
from tensor_ways import GroupedAttention, classifier, document_batch, images, predictor, token_batch
from torch import nn

from labkit.collectives import Network, all_gather_into_tensor
from labkit.mesh import clip_grad_norm_, placements_of
from labkit.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module
from labkit.parallel.tensor import (
    AttentionParallel,
    Replicate,
    Shard,
    conjugates,
    full_grads,
    full_state,
    load_full_state,
    plan_for,
)
from labkit.ranks import RankError, Ranks
from labkit.verify.awkward import tokens_loss


@pytest.fixture(scope="module")
def three():
    with Ranks(3, timeout=30) as ranks:
        yield ranks


# --- the conjugate pairs ---


def against_the_jacobian(name, arguments, size, rank):
    """Backward is the transpose of forward over all ranks: <y, f(x)> of all ranks is <f'(y), x>."""
    pair = getattr(conjugates, name)
    torch.manual_seed(rank)
    x = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    out = pair(x, *arguments)
    y = torch.randn(out.shape, dtype=torch.float64)
    if name in ("reduce_out", "gather_out"):  # what follows is the same on every rank
        torch.manual_seed(99)
        y = torch.randn(out.shape, dtype=torch.float64)
    kept = y.clone()
    out.backward(y)
    both = torch.stack([(y * out.detach()).sum(), (x.grad * before).sum()])
    everyones = torch.empty(size, 2, dtype=both.dtype)
    all_gather_into_tensor(everyones, both)
    return torch.equal(x.detach(), before) and torch.equal(y, kept), everyones.tolist()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("copy_in", ()), ("reduce_out", ()), ("scatter_in", (1,)), ("gather_out", (1,)), ("gather_in", (-1,)),
     ("scatter_out", (1,))],
)  # fmt: skip
def test_each_pair_is_linear_and_backward_is_its_transpose(two, three, name, arguments):
    """The dim of 5 divides for neither; a copy's input is the same on all ranks, and counts once."""
    for ranks in (two, three):

        def run(name=name, arguments=arguments):
            import torch.distributed as dist

            return against_the_jacobian(name, arguments, dist.get_world_size(), dist.get_rank())

        for untouched, products in ranks.run(run):
            assert untouched
            forward, backward = (sum(one[i] for one in products) for i in (0, 1))
            if name in ("reduce_out", "gather_out"):  # one loss, that every rank has
                forward /= ranks.world_size
            if name not in ("copy_in", "scatter_in"):
                assert forward == pytest.approx(backward, rel=1e-12)


def entering(name, arguments):
    import torch.distributed as dist

    pair = getattr(conjugates, name)
    torch.manual_seed(0)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)  # the same on all ranks
    y = torch.randn(dist.get_world_size(), 4, 5, dtype=torch.float64)
    out = pair(x, *arguments)
    mine = y[dist.get_rank()] if name == "copy_in" else y[0].tensor_split(dist.get_world_size(), 1)[dist.get_rank()]
    out.backward(mine)
    return torch.allclose(x.grad, y.sum(0) if name == "copy_in" else y[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "arguments"), [("copy_in", ()), ("scatter_in", (1,))])
def test_what_enters_replicated_gets_the_whole_gradient(two, three, name, arguments):
    assert all(two.run(entering, name, arguments)) and all(three.run(entering, name, arguments))


# --- grouped queries, pieces ---


def differences(build, plan, inputs):
    """Largest difference of output and gradients from the whole module's."""
    torch.manual_seed(0)
    module = build().double()
    whole = copy.deepcopy(module)
    true = whole(inputs)
    true.square().sum().backward()
    parallelize_module(module, None, plan)
    ours = module(inputs)
    ours.square().sum().backward()
    grads = full_grads(module)
    worst = [(grads[name] - one.grad).abs().max().item() for name, one in whole.named_parameters()]
    return max(worst), (ours - true).abs().max().item()


def mlp():
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


COLUMNS_ROWS = {"0": ColwiseParallel(), "2": RowwiseParallel()}
PLANS = [
    COLUMNS_ROWS,
    {"0": ColwiseParallel(output_layouts=Replicate()), "2": RowwiseParallel(input_layouts=Replicate())},
    {"0": ColwiseParallel(), "2": RowwiseParallel(pieces=3)},
    {"2": RowwiseParallel(input_layouts=Replicate(), pieces=9)},
]


@pytest.mark.parametrize("plan", PLANS, ids=["columns, rows", "gathered", "pieces", "rows"])
def test_any_plan_gives_outputs_and_gradients_of_the_whole(two, three, plan):
    torch.manual_seed(1)
    inputs = torch.randn(4, 6, dtype=torch.float64)
    for ranks in (two, three):
        for found in ranks.run(differences, mlp, plan, inputs):
            assert max(found) < 1e-12


def test_grouped_queries_are_shared_out_with_their_keys(two):
    inputs = torch.randn(3, 5, 16, dtype=torch.float64)
    for found in two.run(differences, GroupedAttention, AttentionParallel(), inputs):
        assert max(found) < 1e-12


def test_pytorchs_layouts_are_taken_too():
    from torch.distributed.tensor import Replicate as TheirReplicate
    from torch.distributed.tensor import Shard as TheirShard

    assert ColwiseParallel(input_layouts=TheirShard(1), output_layouts=TheirReplicate()).input == Shard(1)


# --- refusals ---


def refused(build, plan):
    parallelize_module(build(), None, plan() if callable(plan) else plan)


@pytest.mark.parametrize(
    ("build", "plan", "words"),
    [
        (mlp, {"3": ColwiseParallel()}, "names '3', and Sequential has no such submodule; its children are 0, 1, 2"),
        (partial(classifier, 2), {"blocks.*.atention": AttentionParallel()}, "did you mean 'blocks.\\*.attention'"),
        (mlp, {"1": ColwiseParallel()}, "ColwiseParallel: 1 is a Tanh; this style takes nn.Linear and nn.Conv2d"),
        (mlp, {"0": ColwiseParallel(), "*": RowwiseParallel()}, "'0' and '\\*' both give 0 a style: give it one"),
        (mlp, {}, "the plan is empty"),
        (partial(classifier, 2), {"blocks.*.norm1": RowwiseParallel()}, "norm1 is a LayerNorm; this style takes"),
        (partial(classifier, 3), {"blocks.*.attention": AttentionParallel()}, "query has 3 heads, which can't be "
         "shared out evenly among 2 ranks: give a number of ranks that divides 3"),
        (partial(classifier, 3), {"blocks.*.attention.query": ColwiseParallel()}, "attention.query has 3 heads"),
        (partial(predictor, 2), {"embedding.token": RowwiseParallel()}, "head.weight is the same tensor as "
         "embedding.token.weight, which the plan cuts: give 'head' a style that cuts it too"),
        (partial(nn.Linear, 3, 1), ColwiseParallel(), "has 1 outputs, fewer than the 2 ranks"),
        (partial(nn.Conv2d, 4, 4, 1, groups=2), ColwiseParallel(), "groups=2; only groups=1 can be cut"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_with_names_and_numbers(two, build, plan, words):
    with pytest.raises(RankError, match=words) as caught:
        two.run(refused, build, plan)
    assert "\n" not in str(caught.value)


def test_groups_of_channels_that_do_not_divide_are_refused(three):
    def refused():
        model = images(8, "group")
        parallelize_module(model, None, plan_for(model))

    with pytest.raises(RankError, match="layer1.0.bn1 has 4 groups, which can't be shared out evenly among 3 ranks"):
        three.run(refused)


def test_a_sequence_that_does_not_divide_is_refused(two):
    def run():
        model = parallelize_module(m := classifier(2), None, plan_for(m, sequence="shards"))
        model(torch.ones(2, 7, dtype=torch.int64))

    with pytest.raises(RankError, match="a sequence of 7 can't be cut in 2 equal shards: pad it to 8"):
        two.run(run)


def test_sharing_out_twice_is_refused_and_so_is_another_model_on_another_rank(two):
    def twice():
        model = parallelize_module(mlp(), None, COLUMNS_ROWS)
        parallelize_module(model, None, COLUMNS_ROWS)

    def other():
        import torch.distributed as dist

        parallelize_module(nn.Linear(4, 4 + 2 * dist.get_rank()), None, ColwiseParallel())

    with pytest.raises(RankError, match="0.weight is sharded over 'world' already: share a module once"):
        two.run(twice)
    with pytest.raises(RankError, match="build the same model on every rank"):
        two.run(other)


# --- state, clipping, random numbers ---


def saved():
    torch.manual_seed(3)
    model = predictor(2)
    return full_state(parallelize_module(model, None, plan_for(model)))


def loaded(state):
    model = predictor(2, dropout=0.0)
    parallelize_module(model, None, plan_for(model))
    load_full_state(model, state)
    placements = placements_of(model)
    assert placements["embedding.token.weight"].sharded_over and placements["head.norm.weight"].replicated_over
    assert model.head.weight is model.embedding.token.weight
    return full_state(model)


def test_state_is_gathered_to_a_plain_one_and_loaded_by_another_number_of_ranks(two):
    state = two.run(saved)[1]
    predictor(2).load_state_dict(state)
    with Ranks(4) as four:
        again = four.run(loaded, state)[3]
    assert list(again) == list(state) == list(predictor(2).state_dict())
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_state_of_another_model_is_refused(two):
    def run(change):
        model = parallelize_module(mlp(), None, COLUMNS_ROWS)
        load_full_state(model, change(full_state(model)))

    with pytest.raises(RankError, match="the state lacks 2.bias: was another model saved"):
        two.run(run, lambda state: {name: one for name, one in state.items() if name != "2.bias"})
    with pytest.raises(RankError, match=r"0.weight has shape \[4, 6\], not \[7, 6\]: load the whole tensor"):
        two.run(run, lambda state: state | {"0.weight": torch.zeros(4, 6)})


def norms(shared):
    torch.manual_seed(0)
    model = predictor(2).double()
    if shared:
        parallelize_module(model, None, plan_for(model, sequence="shards"))
    inputs, targets = token_batch()
    with loss_parallel() if shared else torch.enable_grad():
        tokens_loss(model(inputs), targets)[0].backward()
    return clip_grad_norm_(model.parameters(), 0.5).item()


def test_clipping_counts_slices_and_the_tied_matrix_once(two):
    ours, true = two.run(norms, True), two.run(norms, False)
    assert ours[0] == ours[1] == pytest.approx(true[0], rel=1e-12)


def masks():
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())  # as different as can be, until the module is shared out
    model = parallelize_module(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)), None,
                               {"0": SequenceParallel()})  # fmt: skip
    sharded, whole = model[0], model[2]
    ones = torch.ones(200)
    return [one(ones).tolist() for one in (sharded, whole, sharded, whole)]


def test_sharded_dropout_draws_other_masks_on_each_rank_and_replicated_dropout_the_same(two):
    first, second = two.run(masks)
    assert first[1] == second[1] and first[3] == second[3] and first[1] != first[3]
    assert first[0] != second[0] and first[2] != second[2] and first[0] != first[2]
    assert 60 < sum(bool(one) for one in first[0]) < 140
    agreeing = sum(bool(one) == bool(other) for one, other in zip(first[0], second[0], strict=True))
    assert 60 < agreeing < 140  # as unrelated masks do


def with_dropout(sequence, checkpointed):
    from labkit.memory import checkpoint_blocks

    torch.manual_seed(5)
    model = classifier(2, dropout=0.3).double()
    checkpoint_blocks(model, 1 if checkpointed else "none")
    parallelize_module(model, None, plan_for(model, sequence=sequence))
    torch.manual_seed(6)
    model(document_batch()[0]).square().sum().backward()
    return {name: one.clone() for name, one in full_grads(model).items()}


@pytest.mark.parametrize("sequence", ["none", "gathered", "shards"])
def test_checkpointed_blocks_draw_their_masks_again(two, sequence):
    kept, again = two.run(with_dropout, sequence, False), two.run(with_dropout, sequence, True)
    for one, other in zip(kept, again, strict=True):
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient, rtol=0, atol=1e-12)
            assert torch.equal(kept[0][name], gradient)  # and the ranks agree


# --- overlap ---


def spans(pieces):
    from labkit.record import Recorder

    torch.manual_seed(0)
    layer = parallelize_module(nn.Linear(256, 256), None, RowwiseParallel(input_layouts=Replicate(), pieces=pieces))
    inputs = torch.randn(64, 256)
    layer(inputs)
    with Recorder() as record:
        layer(inputs)
    sums = [span for span in record.events if span.name == "all_reduce"]
    return len(sums), record.bytes_sent


def test_a_product_in_pieces_sends_the_same_in_more_sums():
    with Ranks(2, network=Network(latency_us=100, bandwidth_gbit_s=1)) as ranks:
        whole, pieces = ranks.run(spans, 1)[0], ranks.run(spans, 4)[0]
    assert whole == (1, pieces[1]) and pieces[0] == 4


# --- beside PyTorch's ---


def both_ways():
    from labkit.bench.tensor_bench import our_block, their_block
    from labkit.models.encoder import Block

    outputs = []
    for share in (our_block, their_block):
        torch.manual_seed(0)
        inputs = torch.randn(2, 5, 64, requires_grad=True)
        block = share(Block(64, 4, 96, False, 0.0))
        output = block(inputs, torch.ones(2, 5, dtype=torch.bool))
        output.square().sum().backward()
        outputs.append((output.detach().clone(), inputs.grad.clone()))
    return outputs


def test_the_benchmark_compares_what_computes_the_same(two):
    for ours, theirs in two.run(both_ways):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
