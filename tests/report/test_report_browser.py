"""The page in a browser: wide, narrow, and with its player."""

import pytest
from browsing import narrow
from report_folders import HOSTILE, make_results, make_run, make_workshop

from jpeg_dlm.report.collect import collect
from jpeg_dlm.report.render import write_report

pytestmark = pytest.mark.slow
OVERFLOW = "return document.documentElement.scrollWidth - window.innerWidth"


def test_the_page_opens_on_a_desk_and_on_a_phone(tmp_path, browser):
    run = make_run(tmp_path / "run", text=HOSTILE + " " + "long" * 200)
    results = make_results(tmp_path / ("name" * 20), text=HOSTILE)
    page = write_report(collect([make_workshop(tmp_path / "shop"), run, results]), tmp_path / "out")
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []  # neither errors nor anything that the policy had to stop
    images = browser.execute_script("return Array.from(document.images, image => [image.complete, image.naturalWidth])")
    assert len(images) >= 2 and all(complete and width > 0 for complete, width in images)
    assert browser.execute_script("return document.scripts.length") == 1  # the player; no text became another
    assert browser.execute_script("return document.querySelectorAll('.player input[type=range]').length") >= 1
    assert browser.execute_script(OVERFLOW) <= 0
    narrow(browser)
    browser.get(page.as_uri())
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.execute_script(OVERFLOW) <= 0 and browser.get_log("browser") == []
