"""The workloads: which data, which network, which loss. All a training loop asks of what is learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.data.image_sets import images
from labkit.data.text_sets import text
from labkit.data.token_blocks import IGNORE, token_stream
from labkit.models import resnet, transformer
from labkit.train.config import TrainConfig


class Batches(Protocol):
    """A data set as the loop reads it: any samples as one batch."""

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None: ...

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Workload:
    """Data, network and loss of a run. `unit` is what the loss is averaged over."""

    train: Batches
    test: Batches
    model: nn.Module
    unit: str

    @staticmethod
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropies over the targets that count; output [..., C], targets [...]."""
        return F.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")

    @staticmethod
    def weight(targets: Tensor) -> int:
        """How many targets count: samples, or valid tokens."""
        return int((targets != IGNORE).sum())

    @staticmethod
    def correct(output: Tensor, targets: Tensor) -> int:
        """How many of them the output has right."""
        return int((output.argmax(-1) == targets).sum())


def make_workload(config: TrainConfig) -> Workload:
    """Open the data and build the network, its weights drawn from the seed in float32 and then converted, so that
    every precision starts from the same ones. Raises what opening data raises."""
    train, test = _open(config, "train", config.limit), _open(config, "test", config.test_limit)
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    torch.manual_seed(config.seed)
    model = _build(config, train).to(dtype)
    return Workload(train, test, model, "tokens" if config.workload == "tokens" else "samples")


def _open(config: TrainConfig, split: str, limit: int) -> Any:
    common: dict[str, Any] = {"folder": config.data_folder or None, "limit": limit or None}
    if config.workload == "text":
        return text(config.set_name, split, max_len=config.max_len, **common)
    if config.workload == "tokens":
        return token_stream(config.set_name, split, block_len=config.max_len, **common)
    return images(
        config.set_name,
        split,
        size=config.image_size or None,
        augment=config.augment and split == "train",
        seed=config.seed,
        dtype=torch.float64 if config.precision == "float64" else torch.float32,
        **common,
    )


def _build(config: TrainConfig, data: Any) -> nn.Module:
    if config.workload == "image":
        channels = data.batch([0])[0].shape[1]
        classes = len(data.classes)
        return resnet(config.depth, num_classes=classes, in_channels=channels, stem=config.stem, norm=config.norm)
    token_level = config.workload == "tokens"
    return transformer(
        vocab_size=data.vocab_size,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        d_ff=config.d_ff or None,
        max_len=config.max_len,
        num_classes=None if token_level else len(data.classes),
        causal=token_level,
        head="token" if token_level else "class",
        dropout=config.dropout,
        pad_id=data.pad_id,
    )
