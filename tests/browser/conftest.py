"""A JupyterLab with its browser for each test module that asks for one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .labpage import LabPage, find_browser, open_browser
from .server import LabServer


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], LabPage]]:
    """`lab = serve(folder)`: JupyterLab on a copy of that folder, in a browser. Ends with the module.

    Skips the test where there is no browser.
    """
    if find_browser() is None:
        pytest.skip("no Chromium or Chrome on the PATH; on Debian: apt install chromium")
    with ExitStack() as stack:

        def start(folder: Path) -> LabPage:
            server = stack.enter_context(LabServer(folder, tmp_path_factory.mktemp("jupyterlab")))
            return stack.enter_context(open_browser(server))

        yield start
