"""The memory of a training step: the ledger that counts it, and the formulas that predict it."""

from labkit.memory.accounts import MemoryBudgetError as MemoryBudgetError
from labkit.memory.activation_formulas import block_activations as block_activations
from labkit.memory.activation_formulas import cross_entropy_activations as cross_entropy_activations
from labkit.memory.activation_formulas import transformer_activations as transformer_activations
from labkit.memory.footprint import Footprint as Footprint
from labkit.memory.ledger import MemoryLedger as MemoryLedger
from labkit.memory.residual_formulas import resnet_activations as resnet_activations
from labkit.memory.state_formulas import optimizer_bytes as optimizer_bytes
from labkit.memory.state_formulas import state_bytes as state_bytes
