"""Bytes held for backward at the end of a forward pass of labkit's transformer, loss included, on the CPU.

What autograd saves is what the backward formula of each operation needs: a linear layer its input; GELU its input; a
norm its input, and mean and 1/std of each row; the embedding its indices; adding saves nothing. What is the output of
one operation and the input of the next is held once. Parameters and the batch itself are not counted here.

Transformer block, in numbers of type e bytes, for b sequences of s tokens, width h, inner width f, a heads:

    norm1       its input h, its output (the input of query, key and value) h, mean and 1/std 2          b s (2 h + 2)
    attention   query, key, value 3 h, output (the input of the last linear layer) h                      b s 4 h
                without dropout, the fused kernel: log of the sums of exponentials a, the mask s          b s (a + s)
                with dropout, the plain one: softmax, dropout's mask, and their product, a s each         b s 3 a s
    norm2       its input h, its output h, mean and 1/std 2                                               b s (2 h + 2)
    feed-forward  GELU's input f, its output f                                                            b s 2 f
    dropout     masks: behind attention h, within f, and behind the feed-forward layers h                 b s (2 h + f)

With f = 4 h and e = 4 that is s b h (64 + 4 s / h + ...) without dropout, and s b h (88 + 12 a s / h + ...) with.

Korthikanti et al. (2022), arXiv:2205.05198, Table 2, have s b h (34 + 5 a s / h) for the same block. There numbers take
2 bytes: 32 of the 34 are these 16 numbers. Dropout's masks take 1 byte: the two behind the sublayers are the other 2
(there is none within the feed-forward layers), and softmax 2, mask 1 and product 2 are the 5. On the CPU dropout's
mask is multiplied with, in the type of the numbers. The fused kernel, which came after that paper (Dao et al. 2022,
arXiv:2205.14135, section 3), keeps no a s^2; but on the CPU it takes the padding mask as numbers, s^2 for each
sequence and block.
"""

import torch


def block_activations(
    *,
    batch_size: int,
    length: int,
    d_model: int,
    num_heads: int,
    d_ff: int | None = None,
    dropout: bool = False,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes that one transformer block holds for backward, its input included."""
    h, a, s, f = d_model, num_heads, length, d_ff or 4 * d_model
    per_token = 8 * h + 2 * f + 4
    per_token += 3 * a * s + 2 * h + f if dropout else s
    logs = 0 if dropout else a * max(4, dtype.itemsize)  # float32 even where the numbers are smaller
    return batch_size * s * (dtype.itemsize * per_token + logs)


def transformer_activations(
    *,
    batch_size: int,
    length: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int | None = None,
    num_classes: int | None = None,
    vocab_size: int | None = None,
    dropout: bool = False,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes that `labkit.models.transformer` and the cross-entropy hold for backward, in float32 or float64.

    Give `num_classes` for the class head or `vocab_size` for the token head. `length` is that of the padded batch,
    targets included.
    """
    if (num_classes is None) == (vocab_size is None):
        raise ValueError("give either num_classes, for the class head, or vocab_size, for the token head.")
    e, tokens = dtype.itemsize, batch_size * length
    blocks = num_layers * block_activations(
        batch_size=batch_size,
        length=length,
        d_model=d_model,
        num_heads=num_heads,
        d_ff=d_ff,
        dropout=dropout,
        dtype=dtype,
    )
    embedding = 8 * length + (e * tokens * d_model if dropout else 0)  # positions, int64; dropout's mask
    norm = e * tokens * (d_model + 2)
    if num_classes is not None:  # which tokens count, and how many; the mean that the linear layer takes
        head = e * (tokens + batch_size + batch_size * d_model)
        return blocks + embedding + norm + head + cross_entropy_activations(batch_size, num_classes, dtype)
    head = e * tokens * d_model
    assert vocab_size is not None
    return blocks + embedding + norm + head + cross_entropy_activations(tokens, vocab_size, dtype)


def cross_entropy_activations(targets: int, classes: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that F.cross_entropy holds: the logarithms of the softmax, the targets (int64), and the sum of weights."""
    return dtype.itemsize * (targets * classes + 1) + 8 * targets
