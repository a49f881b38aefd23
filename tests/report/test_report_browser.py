"""The page in a browser: wide, narrow and printed."""

import base64
import subprocess
import sys
from pathlib import Path

import pytest
from browsing import narrow, prefer
from report_folders import HOSTILE, make_results, make_run, make_workshop

from jpeg_dlm.report.collect import collect
from jpeg_dlm.report.write import write_report
from jpeg_dlm.results.pictures import dress, new_figure, save_png
from jpeg_dlm.results.table import Table, write_result
from jpeg_dlm.studies.compare_report import OURS, PAPER

pytestmark = pytest.mark.slow
LANDMARKS = "return ['main', 'nav', 'header'].map(name => document.getElementsByTagName(name).length)"
OVERFLOW = "return document.documentElement.scrollWidth - window.innerWidth"


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


def test_the_page_opens_on_a_desk_and_on_a_phone(page, browser):
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []  # neither errors nor anything that the policy had to stop
    assert browser.execute_script(LANDMARKS) == [1, 1, 1]
    images = browser.execute_script("return Array.from(document.images, image => [image.complete, image.naturalWidth])")
    assert len(images) >= 2 and all(complete and width > 0 for complete, width in images)
    assert browser.execute_script("return document.scripts.length") == 1  # the player; no text became another
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
        prefer(browser, scheme)
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


def test_samples_are_played_over_training(tmp_path, browser):
    run = make_run(tmp_path / "run", text="The farmer plants corn.")
    (run / "samples" / "step-00000015.txt").write_text("[0] The farmer sells corn.\n[1] two\n")
    browser.get(write_report(collect([run]), tmp_path / "out")[0].as_uri())
    texts = "return Array.from(document.querySelectorAll('.player li'), one => one.textContent)"
    colors = "return Array.from(document.querySelectorAll('.player li:first-child .w'), one => one.className)"
    assert browser.execute_script(texts)[0] == "The farmer plants corn."
    assert browser.execute_script(colors) == ["w s3", "w s3", "w s4", "w s3"]
    slider = browser.find_element("css selector", ".player [type=range]")
    slider.send_keys("\ue011")  # Home
    assert browser.execute_script(texts) == ["early"] and browser.execute_script(colors) == ["w open"]
    assert browser.find_element("css selector", ".player output").text == "step 10 of 20"
    assert browser.get_log("browser") == []
