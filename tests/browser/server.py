"""A JupyterLab of the tests' own: a copy of some notebooks, a free port, a token, settings apart from the user's."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from labkit.learn.opening import free_port, lab_address, lab_command

SETTINGS = {
    # every cell is in the page, not only those in view
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}


class LabServer:
    """`with LabServer(notebooks, home) as server:` serves a copy of the folder `notebooks` until the block ends.

    `home` is an empty folder that takes the copy, the settings and the log.
    """

    def __init__(self, notebooks: Path, home: Path) -> None:
        self.folder = home / "notebooks"
        self.log = home / "jupyterlab.log"
        self.port = free_port(9000)
        self.token = secrets.token_hex(16)
        shutil.copytree(notebooks, self.folder)
        self._environment = {**os.environ, "JUPYTER_TOKEN": self.token}
        for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
            self._environment[f"JUPYTER_{name}"] = str(home / name.lower())
        for name in ("SETTINGS_DIR", "WORKSPACES_DIR"):
            self._environment[f"JUPYTERLAB_{name}"] = str(home / name.lower())
        self._environment["LABKIT_PROGRESS"] = str(home / "progress.json")
        for name, values in SETTINGS.items():
            file = home / "settings_dir" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))

    def address(self, notebook: str) -> str:
        return lab_address(self.folder, self.folder / notebook, port=self.port, token=self.token)

    def __enter__(self) -> "LabServer":
        command = [*lab_command(self.folder, port=self.port, browser=False), "--expose-app-in-browser"]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError(f"JupyterLab did not start; it said: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://localhost:{self.port}/api?token={self.token}", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()  # the server then shuts its kernels down
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
