"""JupyterLab in a browser, as a learner sees it: open a lesson, run all, wait, read errors, count pictures, look."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import FloatRect, Locator, Page, sync_playwright

from .server import LabServer

Theme = Literal["light", "dark"]
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTH, HEIGHT = 1280, 1000


def find_browser() -> str | None:
    """The system's Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def open_browser(server: LabServer) -> Iterator["LabPage"]:
    """A page in the system's browser, pointed at a server. Raises RuntimeError where there is no browser."""
    executable = find_browser()
    if executable is None:
        raise RuntimeError("no Chromium or Chrome on the PATH (on Debian: apt install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        try:
            yield LabPage(browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}), server)
        finally:
            browser.close()


class LabPage:
    """One JupyterLab window. `page` is playwright's page, for whatever is not offered here."""

    def __init__(self, page: Page, server: LabServer) -> None:
        self.page = page
        self.server = server
        page.set_default_timeout(30_000)

    def open(self, notebook: str) -> None:
        """Open a notebook of the server's folder alone in the window, and wait until its kernel is ready."""
        self.page.goto(self.server.address(notebook).replace("?", "?reset&"))
        self.page.wait_for_function(
            """name => window.jupyterapp?.shell.currentWidget?.context?.path === name
                && jupyterapp.shell.currentWidget.context.isReady
                && jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'""",
            arg=notebook,
            timeout=60_000,
        )
        self._do("application:toggle-left-area", when="jupyterapp.shell.leftCollapsed === false")

    def _do(self, command: str, *, arguments: dict[str, Any] | None = None, when: str = "true") -> None:
        script = f"([name, given]) => ({when}) ? jupyterapp.commands.execute(name, given).then(() => null) : null"
        self.page.evaluate(script, [command, arguments or {}])

    def run_all(self) -> None:
        """Choose Run > Run All Cells from the menu."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    def wait_done(self, seconds: float = 180) -> None:
        """Wait until the kernel rests and every code cell has run, or one has failed."""
        self.page.wait_for_function(
            """() => {
                const panel = jupyterapp.shell.currentWidget;
                if (panel.sessionContext.session?.kernel?.status !== 'idle') return false;
                if (panel.node.textContent.includes('[*]')) return false;
                const code = panel.content.widgets.map(cell => cell.model)
                    .filter(model => model.type === 'code' && model.sharedModel.source.trim());
                const failed = code.some(model => model.outputs.toJSON().some(out => out.output_type === 'error'));
                return failed || code.every(model => model.executionCount !== null);
            }""",
            timeout=seconds * 1000,
            polling=200,
        )

    def run_cell(self, cell_id: str, seconds: float = 60) -> None:
        """Put the cursor into a code cell, press Shift-Enter, and wait until it has run."""
        self.cell(cell_id).locator(".cm-content").first.click()
        before = self._count(cell_id)
        self.page.keyboard.press("Shift+Enter")
        self.page.wait_for_function(
            """([index, before]) => {
                const panel = jupyterapp.shell.currentWidget;
                const now = panel.content.widgets[index].model.executionCount;
                return now !== null && now !== before && panel.sessionContext.session.kernel.status === 'idle';
            }""",
            arg=[self.cell_ids().index(cell_id), before],
            timeout=seconds * 1000,
        )

    def write_cell(self, cell_id: str, source: str) -> None:
        """Replace a cell's source, as if the learner had typed it."""
        self.page.evaluate(
            "([index, source]) => jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel"
            ".setSource(source)",
            [self.cell_ids().index(cell_id), source],
        )

    def _count(self, cell_id: str) -> int | None:
        count: int | None = self.page.evaluate(
            "index => jupyterapp.shell.currentWidget.content.widgets[index].model.executionCount",
            self.cell_ids().index(cell_id),
        )
        return count

    def cell_ids(self) -> list[str]:
        ids: list[str] = self.page.evaluate(
            "jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.sharedModel.id)"
        )
        return ids

    def cell(self, cell_id: str) -> Locator:
        """The cell with this id, for playwright to click in or to read."""
        ids = self.cell_ids()
        if cell_id not in ids:
            raise KeyError(f"the notebook has no cell {cell_id!r}; it has {', '.join(ids)}")
        return self.page.locator(".jp-NotebookPanel:visible .jp-Notebook .jp-Cell").nth(ids.index(cell_id))

    def output(self, cell_id: str) -> str:
        """The text that a cell's output shows."""
        return self.cell(cell_id).locator(".jp-OutputArea").first.inner_text()

    def errors(self) -> list[str]:
        """What went wrong, each as `cell id: error: message`; open dialogs too."""
        found: list[str] = self.page.evaluate(
            """() => jupyterapp.shell.currentWidget.content.widgets.flatMap(cell =>
                (cell.model.type === 'code' ? cell.model.outputs.toJSON() : [])
                    .filter(out => out.output_type === 'error')
                    .map(out => `${cell.model.sharedModel.id}: ${out.ename}: ${out.evalue}`))"""
        )
        return found + [f"dialog: {dialog.inner_text()}" for dialog in self.page.locator(".jp-Dialog").all()]

    def pictures(self) -> int:
        """How many pictures the outputs really show: images that have loaded, and drawings in SVG."""
        count: int = self.page.evaluate(
            """() => {
                const outputs = [...jupyterapp.shell.currentWidget.node.querySelectorAll('.jp-OutputArea-output')];
                const images = outputs.flatMap(out => [...out.querySelectorAll('img')]);
                const drawings = outputs.flatMap(out => [...out.querySelectorAll('svg')]);
                return images.filter(image => image.naturalWidth > 0).length + drawings.length;
            }"""
        )
        return count

    def set_theme(self, theme: Theme) -> None:
        """Switch JupyterLab to its light or dark theme, and wait until it shows."""
        name = f"JupyterLab {theme.capitalize()}"
        self._do("apputils:change-theme", arguments={"theme": name})
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)
        self.page.wait_for_timeout(300)  # the style sheets arrive a little after the name

    def screenshot(self, path: Path, *, theme: Theme | None = None) -> None:
        """The window as it is, as a PNG."""
        if theme:
            self.set_theme(theme)
        self.page.screenshot(path=path)

    def screenshots(self, folder: Path, *, theme: Theme, height: int = 1500) -> list[Path]:
        """The whole notebook as PNGs from top to bottom, cut between cells, each at most about `height` pixels."""
        self.set_theme(theme)
        folder.mkdir(parents=True, exist_ok=True)
        cells = self.page.locator(".jp-NotebookPanel:visible .jp-Notebook .jp-Cell")
        self.page.mouse.move(0, 0)
        paths = []
        for number, (first, last) in enumerate(self._parts(height)):
            name = re.sub(r"\W+", "-", self.cell_ids()[first])
            cells.nth(first).evaluate("node => node.scrollIntoView({block: 'start'})")
            self.page.wait_for_timeout(100)
            top, bottom = cells.nth(first).bounding_box(), cells.nth(last).bounding_box()
            assert top and bottom
            paths.append(folder / f"{number:02d}-{name}-{theme}.png")
            height_here = bottom["y"] + bottom["height"] - top["y"]
            clip: FloatRect = {"x": top["x"], "y": top["y"], "width": top["width"], "height": height_here}
            self.page.screenshot(path=paths[-1], clip=clip)
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        return paths

    def _parts(self, height: int) -> list[tuple[int, int]]:
        """Runs of cells (first, last) that fit into one picture; makes the window as tall as the tallest run."""
        heights: list[float] = self.page.evaluate(
            "jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.node.getBoundingClientRect().height)"
        )
        parts: list[tuple[int, int]] = []
        tall, used = 0.0, 0.0
        for index, this in enumerate(heights):
            if parts and used + this <= height:
                parts[-1] = (parts[-1][0], index)
                used += this
            else:
                parts.append((index, index))
                used = this
            tall = max(tall, used)
        self.page.set_viewport_size({"width": WIDTH, "height": int(tall) + 300})
        self.page.wait_for_timeout(300)
        return parts
