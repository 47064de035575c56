"""The transformer, read from top to bottom: embedding, pre-norm blocks of attention and feed-forward, head.

Sources: Vaswani et al. (2017), "Attention Is All You Need", arXiv:1706.03762, sections 3.1 to 3.3; the norm before
each sublayer: Xiong et al. (2020), arXiv:2002.04745, figure 1b; embedding and output tied: Press and Wolf (2017),
arXiv:1608.05859; initial values: Radford et al. (2019), GPT-2, section 2.3.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def transformer(
    *,
    vocab_size: int,
    d_model: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    d_ff: int | None = None,
    max_len: int = 64,
    num_classes: int | None = None,
    causal: bool = False,
    head: str = "class",
    dropout: float = 0.0,
    pad_id: int = 0,
) -> "Transformer":
    """A pre-norm transformer for token ids [B, T], T at most `max_len`; ids equal to `pad_id` are padding.

    `head="class"` gives logits [B, num_classes] from the mean of the last layer over the valid tokens: padding counts
    neither in the mean nor in any attention. `head="token"` gives logits [B, T, vocab_size], by the same matrix as the
    embedding. With `causal` a token attends only to itself and those before it. `d_ff` is the inner width of the
    feed-forward layers, 4 `d_model` if not given.

    Raises `ValueError` in one sentence for settings that make no model.
    """
    sizes = {"vocab_size": vocab_size, "d_model": d_model, "num_layers": num_layers, "num_heads": num_heads}
    for name, size in {**sizes, "max_len": max_len, "d_ff": 4 * d_model if d_ff is None else d_ff}.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}.")
    if d_model % num_heads:
        raise ValueError(
            f"d_model={d_model} can't be split into num_heads={num_heads} equal parts: change one of them."
        )
    if head not in ("class", "token"):
        raise ValueError(f"head must be 'class' or 'token', not {head!r}.")
    if head == "class" and (num_classes is None or num_classes < 1):
        raise ValueError("head='class' needs num_classes, at least 1.")
    if head == "token" and num_classes is not None:
        raise ValueError("head='token' predicts tokens: leave num_classes out.")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout}.")
    if not 0 <= pad_id < vocab_size:
        raise ValueError(f"pad_id must be a token, 0 to {vocab_size - 1}, not {pad_id}.")
    return Transformer(
        vocab_size, d_model, num_layers, num_heads, d_ff or 4 * d_model, max_len, num_classes, causal, dropout, pad_id
    )


class Embedding(nn.Module):
    """Token ids [B, T] to vectors [B, T, d_model], token plus position, and which tokens are valid [B, T]."""

    def __init__(self, vocab_size: int, d_model: int, max_len: int, dropout: float, pad_id: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(max_len, d_model)
        self.dropout = nn.Dropout(dropout)
        self.pad_id = pad_id

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if tokens.dim() != 2 or tokens.shape[1] > self.position.num_embeddings:
            longest = self.position.num_embeddings
            raise ValueError(f"The tokens must be [B, T] with T at most max_len={longest}, not {list(tokens.shape)}.")
        try:
            vectors = self.token(tokens)
        except IndexError:
            largest = self.token.num_embeddings - 1
            raise ValueError(f"Token ids must be 0 to {largest}: is vocab_size that of the tokenizer?") from None
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(vectors + self.position(positions)), tokens != self.pad_id


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., equation 1): softmax(Q K^T / sqrt(d_head)) V in each head.

    Heads are counted by the width of the projections, so that a module with a part of the heads works too.
    """

    def __init__(self, d_model: int, num_heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.head_dim, self.causal, self.dropout = d_model // num_heads, causal, dropout

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """Vectors [B, T, d_model] to the same shape; `valid` [B, T] says which tokens may be attended to."""
        batch, length, _ = x.shape
        query, key, value = (
            project(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # [B, heads, T, head_dim]
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, self._mask(valid), dropout)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, length, -1)))

    def _mask(self, valid: Tensor) -> Tensor:
        """Which token (row) attends to which (column), [B, 1, T, T].

        Every token attends to itself, padding too: a row without any column would be a softmax over nothing, NaN.
        """
        itself = torch.eye(valid.shape[1], dtype=torch.bool, device=valid.device)
        mask = valid[:, None, None, :] | itself
        return mask.tril() if self.causal else mask


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, applied to each token (Vaswani et al., equation 2, with GELU)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.dropout(F.gelu(self.up(x)))))


class Block(nn.Module):
    """Attention, then feed-forward, each behind a norm and beside a shortcut: x + sublayer(norm(x))."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, num_heads, causal, dropout)
        self.norm2 = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, d_ff, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), valid))
        return x + cast(Tensor, self.dropout(self.feed_forward(self.norm2(x))))


class ClassHead(nn.Module):
    """Norm, mean over the valid tokens, linear: [B, T, d_model] to logits [B, num_classes]."""

    def __init__(self, d_model: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.linear = nn.Linear(d_model, num_classes)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        weight = valid.to(x.dtype)[:, :, None]
        mean = (self.norm(x) * weight).sum(1) / weight.sum(1).clamp(min=1)  # all padding: the mean is zero
        return cast(Tensor, self.linear(mean))


class TokenHead(nn.Module):
    """Norm, then the embedding's own matrix: [B, T, d_model] to logits [B, T, vocab_size]."""

    def __init__(self, d_model: int, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.weight = weight

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class Transformer(nn.Module):
    """What `transformer` returns."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        max_len: int,
        num_classes: int | None,
        causal: bool,
        dropout: float,
        pad_id: int,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, d_model, max_len, dropout, pad_id)
        self.blocks = nn.ModuleList(Block(d_model, num_heads, d_ff, causal, dropout) for _ in range(num_layers))
        self.head: nn.Module
        if num_classes is None:
            self.head = TokenHead(d_model, cast(nn.Parameter, self.embedding.token.weight))
        else:
            self.head = ClassHead(d_model, num_classes)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The layers that end in a shortcut start smaller, since 2 num_layers of them add up.
                onto_shortcut = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if onto_shortcut else 0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] to logits, [B, num_classes] or [B, T, vocab_size] by the head."""
        x, valid = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, valid)
        return cast(Tensor, self.head(x, valid))

    def as_sequential(self) -> nn.Sequential:
        """The same modules, not copies, as one sequence: applied in turn they give what `forward` gives.

        The steps are the embedding, the blocks and the head; a pipeline cuts between any two. What passes from one to
        the next is the pair (vectors [B, T, d_model], valid [B, T]). A parameter's name in the model is found by its
        identity; with the token head the first and the last step share one.
        """
        return nn.Sequential(self.embedding, *(_Step(block) for block in self.blocks), _Step(self.head, last=True))


class _Step(nn.Module):
    """A block or head that takes the pair as one value; a block passes `valid` on."""

    def __init__(self, module: nn.Module, *, last: bool = False) -> None:
        super().__init__()
        self.module, self.last = module, last

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        x, valid = pair
        x = self.module(x, valid)
        return x if self.last else (x, valid)
