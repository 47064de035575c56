"""Set up the workbook's own Python environment, `.venv`: what `make lab`, `make test` and `make run` do first.

It runs before anything is installed, as `python labkit/bootstrap.py`, so it uses the standard library alone and
imports nothing of labkit. What is missing (disk, network, a part of Python) is said in one sentence. A stamp in
`.venv` records what was installed; while it agrees with `pyproject.toml` and `constraints.txt` there is nothing to do.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import queue
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Free disk needed on Linux: the environment (6.3 GB with CUDA), the downloads, and the copies that pip caches.
DISK_GB = {"cuda": 13, "cpu": 4}
NO_NETWORK = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeout",
    "Connection refused",
    "ProxyError",
    "Failed to establish a new connection",
    "Network is unreachable",
    "name resolution",
    "Read timed out",
)


class Missing(Exception):
    """Something that the setup needs isn't there; the message is the whole sentence for the reader."""


def environment_python(environment: Path) -> Path:
    """Where the interpreter of a virtual environment lies on this system."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def torch_build(asked: str | None, environment: Path) -> str:
    """Which build of PyTorch to install: the one asked for, else the one already chosen here, else PyPI's.

    PyPI's wheel for Linux is the CUDA build; its wheels for macOS and Windows are CPU builds.
    """
    if asked not in (None, "", "cpu", "cuda"):
        raise Missing(f"TORCH={asked} is not known; take TORCH=cpu (PyTorch's CPU build) or leave it out")
    if platform.system() != "Linux":
        return "cpu"
    return asked or read_stamp(environment).get("torch") or "cuda"


def read_stamp(environment: Path) -> dict[str, str]:
    try:
        stamp = json.loads((environment / "labkit-setup.json").read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def wanted_stamp(build: str) -> dict[str, str]:
    wanted = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        wanted.update((ROOT / name).read_bytes())
    return {"torch": build, "from": wanted.hexdigest(), "root": str(ROOT)}


def write_stamp(environment: Path, stamp: dict[str, str]) -> None:
    part = environment / "labkit-setup.json.part"
    part.write_text(json.dumps(stamp, indent=1))
    part.replace(environment / "labkit-setup.json")


def pinned(name: str) -> str:
    """The requirement `name==version` as the constraints file has it."""
    found = re.search(rf"^{name}==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if not found:
        raise Missing(f"constraints.txt names no version of {name}; restore that line")
    return found.group()


def install_steps(python: Path, build: str, installed_torch: str) -> list[tuple[str, list[str]]]:
    """What pip is asked to do, each step with the line that is shown meanwhile. PyTorch comes first, since all
    that follows would otherwise choose its build."""
    pip = [str(python), "-m", "pip", "install"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    torch = [pinned("torch"), pinned("torchvision")]
    if platform.system() == "Linux" and build == "cpu":
        # --no-deps: the other packages come from PyPI, in the versions of the constraints
        swap = ["--force-reinstall"] if installed_torch and "+cpu" not in installed_torch else []
        first = ("PyTorch, the CPU build", [*pip, *swap, "--no-deps", "--index-url", CPU_INDEX, *torch])
    else:
        swap = ["--force-reinstall"] if build == "cuda" and "+cpu" in installed_torch else []
        size = " (about 3 GB to download; `make lab TORCH=cpu` takes the small CPU build)" if build == "cuda" else ""
        first = (f"PyTorch{size}", [*pip, *swap, *constraints, *torch])
    return [first, ("JupyterLab, the tests and labkit", [*pip, *constraints, "-e", f"{ROOT}[test]"])]


def check_disk(environment: Path, build: str) -> None:
    free = shutil.disk_usage(environment.parent).free / 1e9
    if free < DISK_GB[build]:
        smaller = f", or take the CPU build, `make lab TORCH=cpu` ({DISK_GB['cpu']} GB)" if build == "cuda" else ""
        raise Missing(
            f"the disk of {environment.parent} has {free:.1f} GB free and setting up takes {DISK_GB[build]} GB: "
            f"free some{smaller}"
        )


def make_environment(environment: Path) -> Path:
    """A virtual environment with a working pip; one that is broken (an interrupted start, say) is made anew."""
    python = environment_python(environment)
    probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    if python.exists() and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0:
        return python
    if importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Missing(
            f"{sys.executable} can't make virtual environments: install its venv module "
            f"(on Debian and Ubuntu: apt install python{version}-venv)"
        )
    print(f"labkit: a virtual environment in {environment}", flush=True)
    try:
        venv.create(environment, clear=environment.exists(), with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Missing(f"no virtual environment could be made in {environment}: {error}") from error
    return python


def run_step(title: str, command: list[str], log: Path) -> None:
    """Run one pip command: one line on the screen, moving on a terminal; everything in the log; errors explained."""
    moving = sys.stdout.isatty()
    started = time.monotonic()
    print(f"labkit: {title}", flush=True)
    lines: queue.Queue[str | None] = queue.Queue()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    said: list[str] = []
    doing = ""
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write("$ " + shlex.join(command) + "\n")
            while (line := next_line(lines)) is not None:
                if line:
                    file.write(line)
                    said.append(line.rstrip())
                if re.match(r"\s*(Collecting|Downloading|Using cached|Processing|Building|Installing)\b", line):
                    doing = line.strip()
                if moving:
                    shown = f"  {time.monotonic() - started:4.0f} s  {doing}"
                    print(f"\r\x1b[K{shown[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        if process.wait() != 0:
            raise Missing(explain(said, log))
    finally:
        if moving:
            print("\r\x1b[K", end="", flush=True)
        process.terminate()  # interrupted: pip does not go on by itself


def next_line(lines: "queue.Queue[str | None]") -> str | None:
    """The next line that pip wrote, the empty string where it has written none for a while, None at its end."""
    try:
        return lines.get(timeout=0.5)
    except queue.Empty:
        return ""


def explain(said: list[str], log: Path) -> str:
    """One sentence for what stopped pip."""
    if any("No space left on device" in line for line in said):
        return "the disk filled up while packages were unpacked: free some and run make again"
    if any(sign in line for line in said for sign in NO_NETWORK):
        return f"no network: the package index could not be reached; connect and run make again (details: {log})"
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR:")]
    cause = errors[0] if errors else (said[-1] if said else "no message")
    return f"pip could not install the packages: {cause} (details: {log})"


def installed_version(python: Path, package: str) -> str:
    """The version installed in an environment, or the empty string."""
    code = f"import importlib.metadata as m; print(next((d.version for d in m.distributions(name={package!r})), ''))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def set_up(environment: Path, asked: str | None, *, dry_run: bool = False) -> None:
    """Bring the environment to what `pyproject.toml` and `constraints.txt` say. Raises Missing with one sentence."""
    build = torch_build(asked, environment)
    stamp = wanted_stamp(build)
    python = environment_python(environment)
    if dry_run:
        for _title, command in install_steps(python, build, ""):
            print(shlex.join(command))
        return
    if read_stamp(environment) == stamp and python.exists():
        return
    if not installed_version(python, "torch") if python.exists() else True:
        check_disk(environment, build)
    python = make_environment(environment)
    for title, command in install_steps(python, build, installed_version(python, "torch")):
        run_step(title, command, environment / "labkit-setup.log")
    write_stamp(environment, stamp)


def main() -> int:
    parser = argparse.ArgumentParser(description="set up the workbook's Python environment")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv", help="where it lies")
    parser.add_argument("--torch", help="cpu: PyTorch's CPU build; without it PyPI's")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, install nothing")
    arguments = parser.parse_args()
    try:
        set_up(arguments.environment.absolute(), arguments.torch, dry_run=arguments.dry_run)
    except Missing as missing:
        print(f"labkit: {missing}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nlabkit: stopped; run make again and it goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
