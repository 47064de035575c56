"""`labkit data list | fetch | verify | path`: the sets, from the command line."""

import argparse
import sys

from labkit.data.cache import cache_root
from labkit.data.errors import DataError
from labkit.data.fetching import fetch, path, status, verify


def data_command(argv: list[str]) -> int:
    """Run `labkit data` with the given arguments; its exit status: 0, or 1 after an error, said in one sentence.

    Wrong arguments end in argparse's usage message and `SystemExit(2)`.
    """
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; what came so far is kept, the same command goes on from there.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="labkit data", description="Data sets: what there is, what is here.")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="folder of fetched sets (default: LABKIT_CACHE, or the platform's)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | fetch | verify | path")
    commands.add_parser("list", help="every known set, its size, and whether it is here")
    fetching = commands.add_parser("fetch", help="download and unpack sets")
    fetching.add_argument("names", nargs="+", metavar="NAME")
    fetching.add_argument("--quiet", action="store_true", help="no progress bar")
    verifying = commands.add_parser("verify", help="compare every file with its checksum")
    verifying.add_argument("names", nargs="*", metavar="NAME", help="default: all that are here")
    finding = commands.add_parser("path", help="print the folder of a set that is here")
    finding.add_argument("name", metavar="NAME")
    return parser


def _run(options: argparse.Namespace) -> int:
    root = options.cache
    if options.command == "list":
        print(f"{'name':<16} {'kind':<5} {'MB':>6}  {'state':<8}  what it is, and its licence")
        for found in status(root=root):
            entry = found.entry
            size = "" if entry.embedded else f"{entry.size / 1e6:.1f}" if entry.size else "?"
            print(f"{entry.name:<16} {entry.kind:<5} {size:>6}  {found.state:<8}  {entry.title}")
            print(f"{'':<40} {entry.licence}")
        print(f"Fetched sets are kept in {cache_root(root)}.")
    elif options.command == "fetch":
        for name in options.names:
            print(fetch(name, root=root, progress=not options.quiet))
    elif options.command == "verify":
        here = [found.entry.name for found in status(root=root) if found.state in ("embedded", "complete")]
        for name in options.names or here:
            print(f"{name}: {verify(name, root=root):,} files, every checksum right")
    else:
        print(path(options.name, root=root))
    return 0
