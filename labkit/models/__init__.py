"""The two networks of the workbook, in plain PyTorch: they know nothing of parallelism."""

from labkit.models.encoder import transformer
from labkit.models.residual import resnet

__all__ = ["resnet", "transformer"]
