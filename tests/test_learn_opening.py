"""`labkit lab` makes the workspace, prints one address that works, and leaves nothing when it is ended."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from labkit.learn.leftovers import MARK, marked_processes
from labkit.learn.lessons import all_lessons
from labkit.learn.opening import free_port, has_display, lab_command

LESSONS = all_lessons()


def test_a_display_is_needed_for_a_browser_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not has_display()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert has_display()


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert free_port(taken.getsockname()[1]) > taken.getsockname()[1]


def test_the_command_holds_no_token_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    command = lab_command(tmp_path, port=9999, browser=False, first=tmp_path / "00-a b.ipynb")
    assert not [word for word in command if "token=" in word]
    assert "--LabApp.news_url=None" in command and "--no-browser" in command
    assert command[-1] == "--LabApp.default_url=/lab/tree/00-a%20b.ipynb"


@pytest.mark.skipif(not LESSONS, reason="there are no lessons yet")
@pytest.mark.parametrize("end", [signal.SIGHUP, signal.SIGTERM], ids=["terminal closed", "terminated"])
def test_lab_prints_an_address_that_works_and_its_end_is_its_kernels_end(tmp_path: Path, end: signal.Signals) -> None:
    workspace, mark = tmp_path / "workspace", f"test-lab-{tmp_path.name}"
    environment = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    environment |= {"LABKIT_WORKSPACE": str(workspace), MARK: mark}
    lab = subprocess.Popen(
        [sys.executable, "-m", "labkit", "lab"], env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert lab.stdout is not None
        first_line = lab.stdout.readline()
        address = re.search(r"(http://localhost:\d+)/lab/tree/(\S+)\?token=(\w+)", first_line)
        assert address and address.group(2) == LESSONS[0].path.name
        assert (workspace / LESSONS[0].path.name).exists()
        deadline = time.monotonic() + 60
        status = None
        while status is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(address.group(), timeout=5) as answer:
                    status = answer.status
            except OSError:
                time.sleep(0.1)
        assert status == 200
        headers = {"Authorization": f"token {address.group(3)}"}
        urllib.request.urlopen(urllib.request.Request(f"{address.group(1)}/api/kernels", b"{}", headers)).close()
        assert any("ipykernel_launcher" in process.cmdline() for process in marked_processes(mark))
    finally:
        lab.send_signal(end)
        lab.wait(30)
        assert lab.stdout is not None
        lab.stdout.close()
    deadline = time.monotonic() + 10
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked_processes(mark) == []
