"""report.html in a real browser: it shows what report.csv has; arms and seeds can be switched off.

    python -m pytest tests/test_page.py

Needs Chromium and playwright; skips where one is missing.
"""

import csv
import shutil

import pytest
from helpers import ROOT

import report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The report of five arms with eight seeds."""
    folder = tmp_path_factory.mktemp("page")
    archive = ROOT / "results/cpu/taper/runs.tar.xz"
    report.main([str(archive), "--baseline=rms", f"--out={folder}"])
    return folder


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(out, browser, request):
    """The page, in a window of this width and colour scheme, with its pictures drawn."""
    width, scheme = getattr(request, "param", (1200, "light"))
    size = {"width": width, "height": 800}
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    page.said = []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.said.append(request.url))
    page.goto(f"file://{out / 'report.html'}")
    page.wait_for_function("document.querySelectorAll('.main-svg').length > 5")
    return page


@pytest.mark.parametrize("page", [(1200, "light"), (390, "dark")], indirect=True)
def test_the_page_shows_the_report(out, page):
    assert page.said == [page.url]  # no error, and nothing that a network would be needed for
    shown = page.eval_on_selector_all(
        "tr[data-arm]",
        "rows => rows.map(row => [row.dataset.arm, ...[...row.cells].map(c => c.innerText)])",
    )
    for row in csv.DictReader((out / "report.csv").open()):
        if row["metric"] != "tok_per_s" and row["verdict"] != "not judged":
            [cells] = [cells for cells in shown if cells[:2] == [row["arm"], row["metric"]]]
            difference = f"{float(row['mean_difference']):+.4f}"
            assert cells[3:6] == [row["verdict"], row["n_seeds"], difference]
    font = page.evaluate("document.querySelector('.js-plotly-plot').layout.font.color")
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert font == ("#ddd" if is_dark else "#222")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert (out / "report.html").stat().st_size < 6e6  # small enough to send


def test_what_is_switched_off_is_gone(page):
    off = {"taper", "seed 9"}
    for name in off:
        page.uncheck(f'input[value="{name}"]')
    assert not page.is_visible('tr[data-arm="taper"]')
    assert page.is_visible('tr[data-arm="taper --taper_final=True"]')
    lines = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')]"
        ".flatMap(plot => plot.data.map(line => [line.meta, line.visible]))"
    )
    for meta, is_visible in lines:
        assert is_visible == off.isdisjoint(meta)
    page.check('input[value="taper"]')
    assert page.is_visible('tr[data-arm="taper"]')
