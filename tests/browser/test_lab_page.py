"""The tests' eyes and hands in JupyterLab see what is there: errors, pictures, outputs, both themes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from tiny_lessons import write_lesson

from .labpage import LabPage

PICTURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"
SLIDER = "import ipywidgets\nslider = ipywidgets.IntSlider(description='ranks', value=4)\nslider"


@pytest.fixture(scope="module")
def lab(serve: Callable[[Path], LabPage], tmp_path_factory: pytest.TempPathFactory) -> LabPage:
    folder = tmp_path_factory.mktemp("lessons")
    write_lesson(folder, [PICTURE, SLIDER, "print(world_size + 40)"])
    write_lesson(folder, ["1 / 0", "print('never')"], name="01-bad")
    return serve(folder)


def test_run_all_ends_with_pictures_and_outputs_and_without_errors(lab: LabPage) -> None:
    lab.open("00-tiny.ipynb")
    assert lab.pictures() == 0
    lab.run_all()
    lab.wait_done()
    assert lab.errors() == []
    assert lab.pictures() == 1
    assert lab.output("cell-2").strip() == "42"
    assert lab.cell("cell-1").locator(".widget-slider").count() == 1


def test_a_cell_can_be_written_and_run_alone(lab: LabPage) -> None:
    lab.open("00-tiny.ipynb")
    lab.write_cell("cell-2", "print('typed by hand')")
    lab.run_cell("cell-2")
    assert lab.output("cell-2").strip() == "typed by hand"
    lab.write_cell("cell-2", "1 / 0")
    lab.run_cell("cell-2")
    assert lab.errors() == ["cell-2: ZeroDivisionError: division by zero"]


def test_an_error_ends_the_wait_and_is_named_by_its_cell(lab: LabPage) -> None:
    lab.open("01-bad.ipynb")
    lab.run_all()
    lab.wait_done()
    assert lab.errors() == ["cell-0: ZeroDivisionError: division by zero"]


def test_screenshots_show_the_whole_notebook_in_both_themes(lab: LabPage, tmp_path: Path) -> None:
    lab.open("00-tiny.ipynb")
    brightness = {}
    for theme in ("light", "dark"):
        paths = lab.screenshots(tmp_path / theme, theme=theme, height=300)
        assert len(paths) > 1
        with Image.open(paths[0]) as picture:
            brightness[theme] = picture.convert("L").resize((1, 1)).tobytes()[0]
    assert brightness["light"] > 200 and brightness["dark"] < 60
