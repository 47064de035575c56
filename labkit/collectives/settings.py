"""What holds for all transfers of this process: the emulated network, and whether messages are checked."""

from dataclasses import dataclass

from labkit.collectives.emulation import Emulator
from labkit.collectives.network import Network


@dataclass
class Settings:
    """Set once when a rank starts (`configure`); every rank of a job has the same."""

    check: bool = True  # exchange shape and dtype before each payload
    emulator: Emulator | None = None


settings = Settings()


def configure(*, network: Network | None, rank: int, check: bool = True) -> None:
    """Set the emulated network (None: real transfers only) and whether messages are checked."""
    settings.emulator = None if network is None else Emulator(network, rank)
    settings.check = check
