"""Pictures: on every page, for every reader, the same bytes for the same record."""

import gc
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import nbconvert
import nbformat
import pytest
from invented_records import step_record
from matplotlib._pylab_helpers import Gcf
from matplotlib.figure import Figure

from labkit.show import Picture, bars, lanes, memory_over_time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def small(title: str = "Small <but> told", **options) -> Picture:
    return bars({"a": 1.0, "b": 2.0}, unit="s", title=title, **options)


def test_a_reader_without_the_image_gets_title_and_numbers():
    bundle = small()._repr_mimebundle_()
    assert 'alt="Small &lt;but&gt; told. Bars: s. a: 1 s. b: 2 s."' in bundle["text/html"]
    assert "Small <but> told. Bars: s. a: 1 s. b: 2 s." in bundle["text/plain"]


def test_the_alternative_text_may_be_given():
    assert 'alt="Small &lt;but&gt; told. Two bars."' in small(alt="Two bars.").html()


@pytest.mark.parametrize("empty", ["", "  ", None])
def test_a_picture_needs_a_title_and_an_alternative_text(empty):
    with pytest.raises(ValueError, match="a picture needs title"):
        Picture(Figure(), empty, "something")
    with pytest.raises(ValueError, match="a picture needs alt"):
        Picture(Figure(), "something", empty)
    with pytest.raises(ValueError, match="a picture needs title"):
        small(title=empty)


def test_the_html_survives_a_page_that_strips_inline_svg_and_style_sheets():
    html = small().html()
    outside = html.split("data:image/svg+xml;base64,")[0]
    assert "<svg" not in html
    assert outside.index("</style>") < outside.index("<img ")


def test_the_html_of_nbconvert_has_the_picture_and_its_alternative_text():
    data = small()._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data=data)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("picture", outputs=[output])])
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert page.count('class="labkit-picture"') == 1
    assert 'alt="Small &lt;but&gt; told. Bars: s. a: 1 s. b: 2 s."' in page
    assert 'src="data:image/png' not in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, to look at a picture")
def test_the_paper_follows_the_theme_of_the_page_and_not_that_of_the_system():
    from playwright.sync_api import sync_playwright

    picture = small().html()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for light, system, paper in [("true", "dark", [255] * 3), ("false", "light", [17] * 3)]:
            page = browser.new_page(color_scheme=system)
            page.set_content(f'<body data-jp-theme-light="{light}">{picture}<canvas></canvas></body>')
            seen = page.evaluate(
                """async () => {
                    const image = document.querySelector("img");
                    const pen = document.querySelector("canvas").getContext("2d");
                    await image.decode();
                    pen.drawImage(image, 0, 0);
                    return Array.from(pen.getImageData(0, 0, 1, 1).data.slice(0, 3));
                }"""
            )
            assert seen == pytest.approx(paper, abs=2)
        browser.close()


def test_the_same_record_gives_the_same_bytes():
    assert lanes(step_record(), title="t").svg() == lanes(step_record(), title="t").svg()
    picture = memory_over_time(step_record(), title="t")
    assert picture.svg() == picture.svg()
    assert picture.png() == picture.png()


def test_another_process_gives_the_same_bytes_and_needs_no_pyplot():
    code = (
        "import sys; from invented_records import step_record; from labkit.show import lanes\n"
        "sys.stdout.buffer.write(lanes(step_record(), title='t').svg().encode())\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": str(Path(__file__).parent)}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True).stdout
    assert other.decode() == lanes(step_record(), title="t").svg()


def test_settings_of_the_notebook_neither_change_pictures_nor_are_changed():
    plain = small().svg()
    with matplotlib.rc_context(
        {"lines.linewidth": 9, "axes.facecolor": "red", "font.size": 30, "xtick.direction": "in"}
    ):
        before = dict(matplotlib.rcParams)
        assert small().svg() == plain
        assert dict(matplotlib.rcParams) == before


def test_no_figure_stays_open():
    picture = small()
    picture._repr_mimebundle_()
    figure = weakref.ref(picture.figure)
    assert Gcf.get_all_fig_managers() == []
    del picture
    gc.collect()
    assert figure() is None


def test_a_dollar_sign_is_money():
    ElementTree.fromstring(small(title="$3 or $4").svg())
    assert [text.get_text() for text in small(title="$3 or $4").figure.texts] == ["$3 or $4"]
    assert not small(title="$3 or $4").figure._suptitle.get_parse_math()


def test_a_picture_is_saved_as_svg_or_png(tmp_path):
    picture = small()
    picture.save(tmp_path / "a.svg")
    picture.save(tmp_path / "a.png")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.get("role") == "img" and root.get("aria-label") == picture.words
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"saved as .svg or .png, not as 'a.pdf'"):
        picture.save(tmp_path / "a.pdf")


def test_a_long_title_takes_more_lines_and_stays_within_the_picture():
    picture = small(title="word " * 60)
    picture.figure.canvas.draw()
    box = picture.figure._suptitle.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= picture.figure.bbox.x1
    assert box.y1 <= picture.figure.bbox.y1
    assert box.y0 > picture.figure.axes[0].get_tightbbox().y1
