"""The `%%ranks` magic: run a cell on every rank.

`%load_ext labkit`, then `%%ranks [-n 4] [--on 0,2] [--timeout 60]`. The ranks are those that the notebook's variable
`ranks` holds; where there are none, the magic starts them and sets it.
"""

import argparse
import shlex
from typing import Any, NoReturn

from labkit.ranks.pool import Ranks
from labkit.ranks.processes import warm_up


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"%%ranks: {message}; write %%ranks [-n RANKS] [--on 0,2] [--timeout SECONDS]")


def _rank_list(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


_parser = _Parser(prog="%%ranks", add_help=False)
_parser.add_argument("-n", type=int, default=None)
_parser.add_argument("--on", type=_rank_list, default=None)
_parser.add_argument("--timeout", type=float, default=None)


def ranks_magic(line: str, cell: str) -> None:
    """Run the cell on every rank; names persist between cells. `-n` ranks (2 at first), `--on` some of them."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None
    options = _parser.parse_args(shlex.split(line))
    pool = _pool(shell.user_ns, options)
    chosen = options.on
    if chosen is not None and not set(chosen) <= set(range(pool.world_size)):
        raise ValueError(f"%%ranks: --on {','.join(map(str, chosen))}; there are ranks 0 to {pool.world_size - 1}")
    try:
        values = pool.run_cell(cell, on=chosen)
    except RuntimeError as error:
        _explain_missing_name(error, shell.user_ns)
        raise
    for rank, value in zip(chosen or range(pool.world_size), values, strict=True):
        if value is not None:
            print(f"[rank {rank}] {value}")


def _pool(names: dict[str, Any], options: argparse.Namespace) -> Ranks:
    pool = names.get("ranks")
    wanted = options.n
    if isinstance(pool, Ranks) and wanted in (None, pool.world_size):
        if options.timeout in (None, pool.timeout):
            return pool
        wanted = pool.world_size
    timeout = options.timeout or (pool.timeout if isinstance(pool, Ranks) else 60)
    new = Ranks(wanted or 2, timeout=timeout)
    if isinstance(pool, Ranks):
        pool.close()
        print(f"[ranks] {new.world_size} new ranks; the names of the old ones are gone")
    names["ranks"] = new
    return new


def _explain_missing_name(error: RuntimeError, names: dict[str, Any]) -> None:
    """A name that the notebook has and the ranks don't is the usual surprise: say how to send it."""
    name = getattr(getattr(error, "exception", None), "name", None)
    if getattr(error, "type", "") == "NameError" and name in names:
        hint = f"your notebook has {name!r}, the ranks do not: ranks.push({name}={name}) sends it"
        details = getattr(error, "details", "")
        error.details = f"{details}\n{hint}"  # type: ignore[attr-defined]
        error.args = (f"{error}; {hint}",)


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext labkit`."""
    shell.register_magic_function(ranks_magic, "cell", "ranks")
    warm_up()
