"""The `labkit` command. Each subcommand's room is imported only when it is asked for, so that help comes at once."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import cast

# subcommand: the module and the function that takes its arguments and returns the exit code; its help
COMMANDS = {
    "lab": ("labkit.learn.commands", "lab_command_line", "open JupyterLab on the first lesson"),
    "lessons": ("labkit.learn.commands", "lessons_command", "list the lessons, their minutes and parameters"),
    "run": ("labkit.learn.commands", "run_command", "execute lessons with other parameters, into one table"),
    "sweep": ("labkit.learn.commands", "sweep_command", "execute one lesson over the product of parameter values"),
    "workspace": ("labkit.learn.commands", "workspace_command", "bring the learner's copies of the lessons up to date"),
    "progress": ("labkit.learn.progress_report", "progress_command", "show what is done, predicted and solved"),
    "doctor": ("labkit.learn.doctor", "doctor_command", "what this machine can do for the workbook, what is missing"),
    "data": ("labkit.data.commands", "data_command", "list, fetch and check data sets"),
    "train": ("labkit.train.commands", "train_command", "train a workload with any strategy"),
    "bench": ("labkit.bench.commands", "bench_command", "measure, side by side with PyTorch where it has the same"),
}


def available() -> list[str]:
    """The subcommands whose modules are there; nothing is imported to find out."""
    root = Path(__file__).parent.parent
    return [name for name, (module, _, _) in COMMANDS.items() if (root / f"{module.replace('.', '/')}.py").exists()]


def usage() -> str:
    """The help text of the bare command."""
    lines = [f"  {name:<10} {COMMANDS[name][2]}" for name in available()]
    return "\n".join(["usage: labkit COMMAND [...]", "", *lines, "", "labkit COMMAND --help says more."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 something failed, 2 asked wrongly."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"labkit {version('labkit')}")
        return 0
    if name not in available():
        print(f"labkit: there is no command {name!r}; there are: {', '.join(available())}.", file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]
    command = cast(Callable[[Sequence[str]], int], getattr(import_module(module), function))
    try:
        return command(rest)
    except KeyboardInterrupt:
        print("\nlabkit: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `labkit lessons | head`
        sys.stderr.close()
        return 1
