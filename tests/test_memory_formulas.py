"""The formulas say what the ledger counts, to the byte: state, and the activations of both networks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit.memory import (
    MemoryLedger,
    block_activations,
    optimizer_bytes,
    resnet_activations,
    state_bytes,
    transformer_activations,
)
from labkit.models import resnet, transformer

F32, F64 = torch.float32, torch.float64


def held(net, inputs, targets):
    """The activations at the end of the forward pass, loss included."""
    with MemoryLedger(net) as ledger:
        loss = F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten(), reduction="sum")
        count = ledger.now().of("activations")
    assert loss.requires_grad
    return count


@pytest.mark.parametrize(
    ("depth", "stem", "norm", "batch_size", "side", "dtype"),
    [
        (8, "small", "batch", 4, 28, F32),
        (8, "small", "group", 3, 15, F64),
        (8, "imagenet", "batch", 5, 33, F32),
        (18, "small", "group", 2, 16, F32),
        (18, "imagenet", "batch", 2, 65, F32),
        (50, "imagenet", "batch", 2, 64, F32),
        (50, "small", "batch", 2, 9, F64),
    ],
)
def test_the_residual_network_holds_what_its_formula_says(depth, stem, norm, batch_size, side, dtype):
    net = resnet(depth, num_classes=7, stem=stem, norm=norm).to(dtype)
    images, targets = torch.randn(batch_size, 3, side, side, dtype=dtype), torch.randint(7, (batch_size,))
    said = resnet_activations(depth, batch_size=batch_size, side=side, num_classes=7, stem=stem, norm=norm, dtype=dtype)
    assert held(net, images, targets) == said


SIZES = [  # batch_size, length, d_model, num_layers, num_heads, d_ff
    (2, 8, 16, 1, 2, None),
    (5, 33, 24, 3, 3, 50),
    (1, 64, 8, 2, 8, None),
    (8, 5, 32, 2, 1, 32),
]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("head", ["class", "token"])
@pytest.mark.parametrize(("batch_size", "length", "d_model", "num_layers", "num_heads", "d_ff"), SIZES)
def test_the_transformer_holds_what_its_formula_says(
    head, dropout, dtype, batch_size, length, d_model, num_layers, num_heads, d_ff
):
    shape = {"d_model": d_model, "num_layers": num_layers, "num_heads": num_heads, "d_ff": d_ff}
    net = transformer(
        vocab_size=40,
        max_len=64,
        head=head,
        causal=head == "token",
        num_classes=6 if head == "class" else None,
        dropout=dropout,
        **shape,
    ).to(dtype)
    tokens = torch.randint(0, 40, (batch_size, length))
    targets = tokens if head == "token" else torch.randint(6, (batch_size,))
    said = transformer_activations(
        batch_size=batch_size,
        length=length,
        dropout=dropout > 0,
        dtype=dtype,
        **({"num_classes": 6} if head == "class" else {"vocab_size": 40}),
        **shape,
    )
    if head == "token":
        targets = targets.clone()  # else the loss would hold the batch, which is no activation
    assert held(net, tokens, targets) == said


def test_without_dropout_a_block_takes_64_and_with_it_88_and_12_for_each_head():
    s, b, h, a = 32, 4, 256, 8
    sizes = {"batch_size": b, "length": s, "d_model": h, "num_heads": a}
    assert block_activations(**sizes) == s * b * h * 64 + s * b * (4 * s + 4 * a + 16)
    assert block_activations(**sizes, dropout=True) == s * b * (88 * h + 12 * a * s + 16)


def test_a_block_in_16_bits_halves_all_but_the_logarithms():
    sizes = {"batch_size": 3, "length": 16, "d_model": 32, "num_heads": 4}
    net = transformer(vocab_size=40, num_classes=5, max_len=16, num_layers=2, d_model=32).bfloat16()
    with MemoryLedger(net) as ledger:
        logits = net(torch.randint(1, 40, (3, 16)))
        count = sum(n for name, n in ledger.now().by_module("activations").items() if name.startswith("blocks.1"))
    assert logits.requires_grad
    assert count == block_activations(**sizes, dtype=torch.bfloat16)
    assert 2 * count - block_activations(**sizes) == 4 * 3 * 16 * 4


def tied():
    net = transformer(vocab_size=30, d_model=8, num_layers=1, num_heads=2, max_len=6, head="token")
    return net, torch.randint(30, (2, 6))


def frozen():
    net = resnet(8, num_classes=5)
    net.layer1.requires_grad_(False)
    return net, torch.randn(2, 3, 8, 8)


def double():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(), torch.randn(5, 3, dtype=F64)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [tied, frozen, double])
def test_parameters_gradients_and_optimizer_state_are_as_the_formula_says_to_the_byte(make, optimizer):
    net, inputs = make()
    stepping = OPTIMIZERS[optimizer](net.parameters())
    with MemoryLedger(net, stepping) as ledger:
        net(inputs).square().sum().backward()
        stepping.step()
        now = ledger.now()
    assert {kind: now.of(kind) for kind in state_bytes(net)} == state_bytes(net, optimizer)


def test_adamw_takes_sixteen_bytes_a_parameter_and_a_count_of_steps_for_each_tensor():
    net = nn.Linear(10, 10)
    assert sum(state_bytes(net).values()) == 16 * 110 + 2 * 4
    assert optimizer_bytes(net.parameters(), "momentum") == 4 * 110


def test_what_there_is_no_formula_for_is_refused():
    with pytest.raises(ValueError, match="one of sgd, momentum, adamw, not 'lion'"):
        state_bytes(nn.Linear(1, 1), "lion")
    with pytest.raises(ValueError, match="no resnet of depth 34"):
        resnet_activations(34, batch_size=1, side=8, num_classes=2)
    with pytest.raises(ValueError, match="either num_classes"):
        transformer_activations(batch_size=1, length=1, d_model=8, num_layers=1, num_heads=1)
