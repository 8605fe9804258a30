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


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_shows_the_report(out, browser, width, scheme):
    page = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme
    ).new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{out / 'report.html'}")
    page.wait_for_function("document.querySelectorAll('.main-svg').length > 5")
    assert not said and asked == [f"file://{out / 'report.html'}"]
    shown = page.eval_on_selector_all(
        "tr[data-arm]",
        "rows => rows.map(row => [row.dataset.arm, ...[...row.cells].map(c => c.innerText)])",
    )
    table = [
        row for row in csv.DictReader((out / "report.csv").open()) if row["metric"] != "tok_per_s"
    ]
    for row in table:
        if row["verdict"] == "not judged":
            continue
        [cells] = [cells for cells in shown if cells[:2] == [row["arm"], row["metric"]]]
        assert cells[3:6] == [
            row["verdict"],
            row["n_seeds"],
            f"{float(row['mean_difference']):+.4f}",
        ]
    font = page.evaluate("document.querySelector('.js-plotly-plot').layout.font.color")
    assert font == ("#222" if scheme == "light" else "#ddd")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_what_is_switched_off_is_gone(out, browser):
    page = browser.new_page()
    page.goto(f"file://{out / 'report.html'}")
    page.wait_for_function("document.querySelectorAll('.main-svg').length > 5")
    for name in ("taper", "seed 9"):
        page.uncheck(f'input[value="{name}"]')
    assert not page.is_visible('tr[data-arm="taper"]') and page.is_visible('tr[data-arm="rms"]')
    lines = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')]"
        ".flatMap(plot => plot.data.map(line => [line.meta, line.visible]))"
    )
    off = {tuple(meta) for meta, visible in lines if not visible}
    assert {meta for meta in off if "taper" not in meta and "seed 9" not in meta} == set()
    assert {tuple(meta) for meta, _ in lines if {"taper", "seed 9"} & {*meta}} == off
    page.check('input[value="taper"]')
    assert page.is_visible('tr[data-arm="taper"]')


def test_a_page_is_small_enough_to_send(out):
    assert (out / "report.html").stat().st_size < 6e6
