"""The `%%ranks` magic: run a cell on every rank.

`%load_ext labkit`, then `%%ranks [-n 4] [--on 0,2] [--timeout 60]`. The ranks are those that the notebook's variable
`ranks` holds; where there are none, the magic starts them and sets it.
"""

import argparse
import re
import shlex
from typing import Any, NoReturn

from labkit.ranks.errors import RankError
from labkit.ranks.forking import warm_up
from labkit.ranks.output import labelled
from labkit.ranks.pool import Ranks


class MagicError(ValueError):
    """`%%ranks` was asked wrongly: shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"ValueError: {self}"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MagicError(f"%%ranks: {message}; write %%ranks [-n RANKS] [--on 0,2] [--timeout SECONDS]")


def _some_ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks such as 0,2") from None


_parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
_parser.add_argument("-n", type=int, default=None)
_parser.add_argument("--on", type=_some_ranks, default=None)
_parser.add_argument("--timeout", type=float, default=None)


def ranks_magic(line: str, cell: str) -> None:
    """Run the cell on every rank; names persist between cells.

    -n RANKS: how many there are, 2 at first; another number starts new ones. --on 0,2: only on these. --timeout
    SECONDS: how long one wait of this cell may last.
    """
    from IPython.core.getipython import get_ipython

    __tracebackhide__ = True
    shell = get_ipython()
    assert shell is not None
    try:
        options = _parser.parse_args(shlex.split(line))
        pool = _pool(shell.user_ns, options.n)
        # the line of the magic counts, so that lines are numbered as the notebook shows them
        values = pool.run_cell("\n" + cell, on=options.on, timeout=options.timeout)
    except RankError as error:
        _explain_missing_name(error, shell.user_ns)
        raise
    except ValueError as error:
        raise MagicError(f"%%ranks: {str(error).removeprefix('%%ranks: ').removeprefix('Ranks: ')}") from None
    for rank, value in zip(sorted(options.on or range(pool.world_size)), values, strict=True):
        if value is not None:
            print(labelled(rank, value.splitlines()))


def _pool(names: dict[str, Any], wanted: int | None) -> Ranks:
    """The ranks of the notebook; new ones where there are none, or another number of them."""
    old = names.get("ranks")
    if old is None:
        names["ranks"] = Ranks(2 if wanted is None else wanted)
    elif not isinstance(old, Ranks):
        raise MagicError(
            f"%%ranks: it keeps its ranks under the name 'ranks', and yours is a {type(old).__name__}: rename yours"
        )
    elif wanted not in (None, old.world_size):
        assert wanted is not None
        names["ranks"] = Ranks(wanted, old.backend, old.timeout, old.network, threads=old.threads, check=old.check)
        old.close()
        print(f"[ranks] {wanted} new ranks; the names of the old ones are gone")
    found: Ranks = names["ranks"]
    return found


def _explain_missing_name(error: RankError, names: dict[str, Any]) -> None:
    """A name that the notebook has and the ranks don't is the usual surprise: say how to send it."""
    missing = re.search(r"name '(\w+)' is not defined", str(error))
    if error.type == "NameError" and missing and missing[1] in names:
        name = missing[1]
        hint = f"your notebook has {name!r}, the ranks do not: ranks.push({name}={name}) sends it"
        error.details = f"{error.details}\n{hint}"
        error.args = (f"{error}; {hint}",)


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext labkit`."""
    shell.register_magic_function(ranks_magic, "cell", "ranks")
    warm_up()
