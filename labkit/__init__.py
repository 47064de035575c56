"""labkit: the code behind the workbook on training neural networks at scale."""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit`: the %%ranks magic, and the fork server warmed up in the background."""
    from labkit.ranks.magic import load_ipython_extension as load

    load(shell)
