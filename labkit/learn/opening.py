"""Open JupyterLab on a lesson: the command line, and whether a browser can be shown here."""

import os
import secrets
import socket
import sys
import urllib.parse
from pathlib import Path


def has_display() -> bool:
    """Whether a browser window can appear here: always on macOS and Windows, with X11 or Wayland elsewhere."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def free_port(first: int = 8888) -> int:
    """The first port from `first` on that nothing on this machine listens to."""
    for port in range(first, first + 1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                continue
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {first} to {first + 999} is free")


def lab_command(folder: Path, *, port: int, browser: bool, first: Path | None = None) -> list[str]:
    """The JupyterLab command for a folder of notebooks, with nothing that asks the network for news or updates.

    The access token is read from the environment variable JUPYTER_TOKEN, so that it shows in no process list.
    """
    command = [
        *(sys.executable, "-m", "jupyterlab"),
        f"--ServerApp.root_dir={folder}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--Application.log_level=WARN",
        "--KernelManager.transport_encryption=auto",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # JupyterLab refuses root otherwise, and in a container one often is
    if first is not None:
        command.append(f"--LabApp.default_url=/lab/tree/{urllib.parse.quote(str(first.relative_to(folder)))}")
    return command


def lab_address(folder: Path, first: Path, *, port: int, token: str) -> str:
    """The address of one notebook in a JupyterLab that `lab_command` started."""
    return f"http://localhost:{port}/lab/tree/{urllib.parse.quote(str(first.relative_to(folder)))}?token={token}"


def open_lab(folder: Path, first: Path, *, port: int | None = None, browser: bool | None = None) -> None:
    """Become JupyterLab on the notebook `first` in `folder`; does not return.

    It replaces this process instead of starting another, so that whatever ends the terminal ends JupyterLab too.
    """
    port = free_port() if port is None else port
    browser = has_display() if browser is None else browser
    token = os.environ.setdefault("JUPYTER_TOKEN", secrets.token_hex(24))
    print(f"labkit: JupyterLab will be at {lab_address(folder, first, port=port, token=token)}")
    if not browser:
        print(f"labkit: from another machine, first run there: ssh -L {port}:localhost:{port} <this machine>")
    print("labkit: end it with Ctrl-C, twice.", flush=True)
    command = lab_command(folder, port=port, browser=browser, first=first)
    os.execv(command[0], command)
