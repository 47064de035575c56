"""The residual network, read from top to bottom: stem, stages of residual blocks, head.

Source: He, Zhang, Ren, Sun (2016), "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1; the
stride of a bottleneck sits in its 3x3 convolution, as in torchvision. Parameters have torchvision's names, so that a
`state_dict` passes between the two.
"""

from torch import Tensor, nn

from labkit.models.norms import Norm, find_norm

# depth: kind of block, blocks in each stage, width of each stage
_DEPTHS: dict[int, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    8: ("basic", (1, 1, 1), (16, 32, 64)),
    18: ("basic", (2, 2, 2, 2), (64, 128, 256, 512)),
    50: ("bottleneck", (3, 4, 6, 3), (64, 128, 256, 512)),
}


def resnet(
    depth: int, *, num_classes: int, in_channels: int = 3, stem: str = "small", norm: str = "batch"
) -> "ResidualNetwork":
    """A residual network for images [B, in_channels, H, W]; its output are logits [B, num_classes].

    `depth` is 8 (three stages of one basic block, widths 16, 32, 64), 18 or 50. `stem` is "small" for images of about
    32 pixels (one 3x3 convolution) or "imagenet" for large ones (7x7 of stride 2, then pooling of stride 2). `norm` is
    "batch" or "group" (Wu and He 2018, arXiv:1803.08494: at most 32 groups of at least 4 channels), which normalises
    each sample by itself, so that the result doesn't depend on how a batch is split. "sync" is BatchNorm over the whole
    batch of all ranks, where `labkit.parallel` is imported.

    Raises `ValueError` in one sentence for anything else.
    """
    if depth not in _DEPTHS:
        raise ValueError(f"There is no resnet of depth {depth}: choose 8, 18 or 50.")
    if num_classes < 1 or in_channels < 1:
        raise ValueError(f"num_classes and in_channels must be at least 1, not {num_classes} and {in_channels}.")
    return ResidualNetwork(depth, num_classes, in_channels, stem, find_norm(norm))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: relu(x + norm(conv(relu(norm(conv(x))))))."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm(width)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(channels, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Images of features [B, channels, H, W] to [B, width, H/stride, W/stride]."""
        y: Tensor = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))  # type: ignore[no-any-return]


class BottleneckBlock(nn.Module):
    """A 1x1 convolution to fewer channels, a 3x3, a 1x1 to four times as many, beside a shortcut."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        wide = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, wide, 1, bias=False)
        self.bn3 = norm(wide)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(channels, wide, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Images of features [B, channels, H, W] to [B, 4 width, H/stride, W/stride]."""
        y: Tensor = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))  # type: ignore[no-any-return]


def _shortcut(channels: int, wide: int, stride: int, norm: Norm) -> nn.Module | None:
    """A 1x1 convolution where the block changes the shape, so that the two can be added; else nothing."""
    if stride == 1 and channels == wide:
        return None
    return nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), norm(wide))


class ResidualNetwork(nn.Module):
    """What `resnet` returns. Its stages halve the side of the image, all but the first."""

    def __init__(self, depth: int, num_classes: int, in_channels: int, stem: str, norm: Norm) -> None:
        super().__init__()
        kind, blocks, widths = _DEPTHS[depth]
        block = BasicBlock if kind == "basic" else BottleneckBlock
        if stem == "small":
            self.conv1 = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
            self.maxpool: nn.Module = nn.Identity()
        elif stem == "imagenet":
            self.conv1 = nn.Conv2d(in_channels, widths[0], 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            raise ValueError(f"stem must be 'small' or 'imagenet', not {stem!r}.")
        self.bn1 = norm(widths[0])
        self.relu = nn.ReLU()
        channels = widths[0]
        self._stage_names = [f"layer{number}" for number in range(1, len(widths) + 1)]
        for name, count, width in zip(self._stage_names, blocks, widths, strict=True):
            stage = nn.Sequential()
            for i in range(count):
                stride = 2 if i == 0 and name != "layer1" else 1
                stage.append(block(channels, width, stride, norm))
                channels = width * block.expansion
            self.add_module(name, stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # He et al. (2015), arXiv:1502.01852, section 2.2, by the number of outputs, as in torchvision
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, in_channels, H, W] to logits [B, num_classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self._stage_names:
            x = self.get_submodule(name)(x)
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]

    def as_sequential(self) -> nn.Sequential:
        """The same modules, not copies, as one sequence: applied in turn they give what `forward` gives.

        One step is the stem's convolution, norm, activation or pooling, a residual block, or a part of the head; a
        pipeline cuts between any two. A parameter's name in the model is found by its identity.
        """
        blocks = [block for name in self._stage_names for block in self.get_submodule(name).children()]
        stem = [self.conv1, self.bn1, self.relu, self.maxpool]
        return nn.Sequential(*stem, *blocks, self.avgpool, nn.Flatten(1), self.fc)
