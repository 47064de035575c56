"""The transformer: equal to torch.nn's, blind to padding and to the future, easy to cut."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.models import transformer

VOCAB, WIDTH, LAYERS, HEADS, INNER, LENGTH, CLASSES = 50, 24, 3, 4, 40, 12, 5


def build(**settings: object) -> Any:
    defaults: dict[str, object] = {
        "vocab_size": VOCAB,
        "d_model": WIDTH,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "d_ff": INNER,
        "max_len": LENGTH,
        "num_classes": CLASSES,
    }
    torch.manual_seed(1)
    model = transformer(**defaults | settings)  # type: ignore[arg-type]
    for (
        name,
        parameter,
    ) in model.named_parameters():  # the initial values are small and the biases zero: equal too easily
        nn.init.normal_(parameter, std=0.3)
        if "norm" in name:
            parameter.data += 1
    return model.double()


def language(**settings: object) -> Any:
    return build(num_classes=None, head="token", causal=True, **settings)


def tokens(batch: int = 3, length: int = LENGTH) -> Tensor:
    """Ids without padding."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def padded() -> Tensor:
    """Three documents of 12, 7 and 1 tokens."""
    ids = tokens()
    ids[1, 7:] = 0
    ids[2, 1:] = 0
    return ids


def torch_twin(model: Any) -> Any:
    """PyTorch's encoder with the weights of `model`'s blocks and final norm."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False).double()
    weights: dict[str, Tensor] = {}
    renamed = {
        "norm1": "norm1",
        "norm2": "norm2",
        "attention.out": "self_attn.out_proj",
        "feed_forward.up": "linear1",
        "feed_forward.down": "linear2",
    }
    for i, block in enumerate(model.blocks):
        ours = block.state_dict()
        for kind in ("weight", "bias"):
            weights[f"layers.{i}.self_attn.in_proj_{kind}"] = torch.cat(
                [ours[f"attention.{part}.{kind}"] for part in ("query", "key", "value")]
            )
            for name, theirs in renamed.items():
                weights[f"layers.{i}.{theirs}.{kind}"] = ours[f"{name}.{kind}"]
    weights["norm.weight"], weights["norm.bias"] = model.head.norm.weight, model.head.norm.bias
    encoder.load_state_dict(weights)
    return encoder


def embedded(model: Any, ids: Tensor) -> Any:
    return model.embedding.token(ids) + model.embedding.position.weight[: ids.shape[1]]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_with_the_same_weights_the_class_head_equals_torchs_encoder_and_a_masked_mean(
    causal: bool, training: bool
) -> None:
    model, ids = build(causal=causal).train(training), padded()
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if causal else None
    encoded = torch_twin(model).train(training)(embedded(model, ids), future, ids == 0, is_causal=causal)
    means = torch.stack([encoded[i, :length].mean(0) for i, length in enumerate((12, 7, 1))])
    torch.testing.assert_close(model(ids), model.head.linear(means), rtol=1e-9, atol=1e-9)


def test_with_the_same_weights_the_token_head_equals_torchs_encoder_and_the_embedding_matrix() -> None:
    model, ids = language(), tokens()
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    encoded = torch_twin(model)(embedded(model, ids), future, is_causal=True)
    torch.testing.assert_close(model(ids), encoded @ model.embedding.token.weight.T, rtol=1e-9, atol=1e-9)


def test_gradients_equal_those_of_torchs_encoder() -> None:
    model, ids = build(), padded()
    twin = torch_twin(model)
    encoded = twin(embedded(model, ids).detach(), src_key_padding_mask=ids == 0)
    mean = torch.stack([encoded[i, :length].mean(0) for i, length in enumerate((12, 7, 1))])
    F.linear(mean, model.head.linear.weight.detach(), model.head.linear.bias.detach()).square().sum().backward()
    model(ids).square().sum().backward()
    for i, block in enumerate(model.blocks):
        theirs = twin.layers[i].self_attn.in_proj_weight.grad.chunk(3)
        ours = [getattr(block.attention, part).weight.grad for part in ("query", "key", "value")]
        for actual, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(
            block.feed_forward.up.weight.grad, twin.layers[i].linear1.weight.grad, rtol=1e-7, atol=1e-9
        )


def test_parameter_count_is_that_of_torchs_encoder_and_of_embedding_and_head() -> None:
    encoder = sum(p.numel() for p in torch_twin(build()).parameters())
    embeddings = (VOCAB + LENGTH) * WIDTH
    assert sum(p.numel() for p in build().parameters()) == encoder + embeddings + (WIDTH + 1) * CLASSES
    assert sum(p.numel() for p in language().parameters()) == encoder + embeddings  # the head adds none


def test_attention_is_the_softmax_of_equation_1_written_out() -> None:
    attention = build().blocks[0].attention
    x, valid = torch.randn(2, 5, WIDTH, dtype=torch.float64), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    size = WIDTH // HEADS
    query, key, value = attention.query(x), attention.key(x), attention.value(x)
    mixed = torch.zeros_like(x)
    for sample in range(2):
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            for i in range(5):
                seen = [j for j in range(5) if valid[sample, j] or j == i]
                scores = torch.stack([query[sample, i, part] @ key[sample, j, part] for j in seen]) / math.sqrt(size)
                mixed[sample, i, part] = scores.softmax(0) @ value[sample, seen][:, part]
    torch.testing.assert_close(attention(x, valid), attention.out(mixed), rtol=1e-9, atol=1e-9)


def test_padding_changes_nothing() -> None:
    model, ids = build(), tokens(length=7)
    longer = F.pad(ids, (0, 5), value=0)
    torch.testing.assert_close(model(longer), model(ids), rtol=1e-9, atol=1e-12)


def test_padding_gets_no_gradient() -> None:
    model = build()
    model(padded()).sum().backward()
    gradient = model.embedding.token.weight.grad
    assert gradient is not None
    assert gradient[0].abs().sum() == 0 < gradient[padded()[0, 0]].abs().sum()


def test_another_pad_id_is_padding_and_0_then_is_a_token() -> None:
    other, ids = build(pad_id=9), tokens(length=7).clamp(max=8)
    torch.testing.assert_close(other(F.pad(ids, (0, 5), value=9)), other(ids), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(other(F.pad(ids, (0, 5), value=0)), other(ids), atol=1e-3)


@pytest.mark.parametrize("model", [build(), build(causal=True), language()], ids=["class", "causal class", "token"])
def test_a_sample_of_padding_alone_gives_no_nan_and_leaves_the_others_alone(model: Any) -> None:
    ids = tokens()
    ids[1] = 0
    model.zero_grad()
    logits = model(ids)
    torch.testing.assert_close(logits[[0, 2]], model(ids[[0, 2]]), rtol=1e-9, atol=1e-12)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_causal_model_does_not_see_the_future_and_another_does() -> None:
    ids = tokens()
    changed = ids.clone()
    changed[:, 8] = ids[:, 8] % (VOCAB - 1) + 1
    for causal in (True, False):
        model = build(num_classes=None, head="token", causal=causal)
        before, after = model(ids), model(changed)
        assert torch.equal(before[:, :8], after[:, :8]) == causal
        assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_the_token_head_is_tied_to_the_embedding_through_a_copy_a_cast_and_a_step() -> None:
    model = copy.deepcopy(language()).float()
    assert model.head.weight is model.embedding.token.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    before = model.embedding.token.weight.clone()
    optimizer.step()
    assert not torch.equal(before, model.embedding.token.weight)
    assert torch.equal(model.head.weight, model.embedding.token.weight)
    assert [name for name, _ in model.named_parameters() if name.endswith("token.weight")] == ["embedding.token.weight"]


@pytest.mark.parametrize("model", [build(), build(causal=True), language()], ids=["class", "causal class", "token"])
@pytest.mark.parametrize("cut", range(1, LAYERS + 2))
def test_the_sequence_of_its_modules_composes_to_the_model_wherever_it_is_cut(model: Any, cut: int) -> None:
    steps = model.as_sequential()
    assert len(steps) == LAYERS + 2
    assert torch.equal(steps[cut:](steps[:cut](padded())), model(padded()))
    assert {id(p) for p in steps.parameters()} == {id(p) for p in model.parameters()}


def test_at_the_start_all_classes_and_all_tokens_are_about_equally_likely() -> None:
    ids = torch.randint(1, 4096, (8, 64))
    labels = torch.randint(12, (8,))
    model = transformer(vocab_size=4096, num_classes=12)
    assert F.cross_entropy(model(ids), labels).item() == pytest.approx(math.log(12), rel=0.05)
    model = transformer(vocab_size=4096, head="token", causal=True)
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(4096), rel=0.05)


def test_dropout_acts_in_training_only() -> None:
    model, ids = build(dropout=0.5), tokens()
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    torch.testing.assert_close(model(ids), build()(ids))


def test_half_of_the_heads_make_a_working_attention_of_half_the_width() -> None:
    whole = build().blocks[0].attention
    x, valid = torch.randn(2, 5, WIDTH, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool)
    partial = []
    for half in (slice(0, WIDTH // 2), slice(WIDTH // 2, WIDTH)):
        part = copy.deepcopy(whole)
        for name in ("query", "key", "value"):
            layer = getattr(part, name)
            layer.weight, layer.bias = nn.Parameter(layer.weight[half]), nn.Parameter(layer.bias[half])
        part.out.weight, part.out.bias = nn.Parameter(part.out.weight[:, half]), None
        partial.append(part(x, valid))
    torch.testing.assert_close(sum(partial) + whole.out.bias, whole(x, valid), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_heads": 5}, r"d_model=24 can't be split into num_heads=5 equal parts: change one of them\.$"),
        ({"head": "mean"}, r"head must be 'class' or 'token', not 'mean'\.$"),
        ({"num_classes": None}, r"head='class' needs num_classes, at least 1\.$"),
        ({"head": "token"}, r"leave num_classes out\.$"),
        ({"num_layers": 0}, r"num_layers must be at least 1, not 0\.$"),
        ({"d_ff": 0}, r"d_ff must be at least 1, not 0\.$"),
        ({"dropout": 1.0}, r"dropout must be at least 0 and below 1, not 1\.0\.$"),
        ({"pad_id": 50}, r"pad_id must be a token, 0 to 49, not 50\.$"),
    ],
)
def test_settings_that_make_no_model_are_refused_in_a_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build(**settings)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (torch.ones(2, LENGTH + 1, dtype=torch.int64), r"T at most max_len=12, not \[2, 13\]\.$"),
        (torch.ones(LENGTH, dtype=torch.int64), r"must be \[B, T\] with T at most max_len=12, not \[12\]\.$"),
        (torch.full((2, 3), VOCAB), r"Token ids must be 0 to 49: is vocab_size that of the tokenizer\?$"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_in_a_sentence(ids: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build()(ids)
