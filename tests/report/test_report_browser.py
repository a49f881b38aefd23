"""The page in a browser: wide, narrow and printed."""

import base64
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from report_folders import HOSTILE, make_results, make_run, make_workshop

from jpeg_dlm.report.collect import collect
from jpeg_dlm.report.write import write_report
from jpeg_dlm.results.pictures import dress, new_figure, save_png
from jpeg_dlm.results.table import Table, write_result
from jpeg_dlm.studies.compare_report import OURS, PAPER

pytestmark = pytest.mark.slow
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
LANDMARKS = "return ['main', 'nav', 'header'].map(name => document.getElementsByTagName(name).length)"
OVERFLOW = "return document.documentElement.scrollWidth - window.innerWidth"


@pytest.fixture
def browser(tmp_path):
    """Debian's Chromium; without one this fails, `make browser` installs it."""
    from selenium import webdriver

    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    assert all(found.values()), f"a browser is missing, install it with  make browser  ({found})"
    options = webdriver.ChromeOptions()
    options.binary_location = str(found["chromium"])
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(found["chromedriver"])))
    yield driver
    driver.quit()


@pytest.fixture
def workshop(tmp_path) -> Path:
    return make_workshop(tmp_path / "shop")


@pytest.fixture
def page(workshop, tmp_path) -> Path:
    """A report with real pictures and hostile texts."""
    run = make_run(tmp_path / "run", text=HOSTILE + " " + "long" * 200)
    results = make_results(tmp_path / ("name" * 20), text=HOSTILE)
    figure, panels = new_figure(3, "three panels")
    for axes in panels:
        axes.plot([1, 2, 3], [3, 1, 2])
        dress(axes, "heading", "y (unit)", "x (unit)")
    save_png(figure, workshop / "compare.png")
    return write_report(collect([workshop, run, results]), tmp_path / "out")[0]


def narrow(driver):
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )


def test_the_page_opens_on_a_desk_and_on_a_phone(page, browser):
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []  # neither errors nor anything that the policy had to stop
    assert browser.execute_script(LANDMARKS) == [1, 1, 1]
    images = browser.execute_script("return Array.from(document.images, image => [image.complete, image.naturalWidth])")
    assert len(images) >= 2 and all(complete and width > 0 for complete, width in images)
    assert browser.execute_script("return document.scripts.length") == 0
    assert browser.execute_script(OVERFLOW) <= 0
    narrow(browser)
    browser.get(page.as_uri())
    assert browser.execute_script("return window.innerWidth") == 390 and browser.execute_script(OVERFLOW) <= 0
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.execute_script(OVERFLOW) <= 0  # nor with everything unfolded
    wide = "return Array.from(document.querySelectorAll('.scroll'), one => one.scrollWidth > one.clientWidth)"
    assert any(browser.execute_script(wide))  # what is too wide scrolls in its own place
    assert browser.get_log("browser") == []


EDGES = """
const box = document.querySelector('.scroll'), cells = box.querySelector('tbody tr').children;
box.scrollLeft = arguments[0];
const [inside, first, last] = [box, cells[0], cells[cells.length - 1]].map(one => one.getBoundingClientRect());
const [beyond, bar] = [box.scrollWidth - box.clientWidth, box.offsetHeight - box.clientHeight];
return [beyond, bar, first.left - inside.left, last.right - inside.right];
"""


def test_a_wide_table_scrolls_in_its_box_and_keeps_its_names(tmp_path, browser):
    """At 1,200 pixels, where a comparison has more columns than there is room for."""
    heading = [*OURS, *(f"paper, lm1b: {name}" for name in PAPER)]
    cells = [["JPEG-DLM", *["123.45 ± 10.25"] * (len(heading) - 1)]]
    write_result(tmp_path / "shop" / "compare", {}, [Table.of("", heading, cells)])
    browser.set_window_size(1200, 900)
    browser.get(write_report(collect([tmp_path / "shop"]), tmp_path / "out")[0].as_uri())
    beyond, bar, left, right = browser.execute_script(EDGES, 0)
    assert beyond > 100 and bar >= 8 and left == pytest.approx(0, abs=1) and right > 100
    *_, left, right = browser.execute_script(EDGES, 10_000)
    assert left == pytest.approx(0, abs=1) and right <= 1  # the name is still there, and so is the last column
    assert browser.execute_script(OVERFLOW) <= 0


def test_the_page_is_dark_where_that_is_preferred(page, browser):
    colors = []
    for scheme in ("light", "dark"):
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        browser.get(page.as_uri())
        color = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        colors.append(sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")))
    assert colors[0] > 700 and colors[1] < 100


def test_the_page_prints(page, browser):
    browser.get(page.as_uri())
    pdf = base64.b64decode(browser.print_page())
    assert pdf.startswith(b"%PDF-") and pdf.rstrip().endswith(b"%%EOF") and len(pdf) > 20_000


def test_the_installed_command_needs_no_network(workshop, tmp_path, browser):
    """As a person calls it, in a process of its own."""
    command = [sys.executable, "-m", "jpeg_dlm.cli.main", "report", str(workshop), "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    browser.execute_cdp_cmd("Network.enable", {})
    browser.get((tmp_path / "out" / "index.html").as_uri())
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map(one => one.name.slice(0, 5))")
    assert set(fetched) <= {"data:"}
