"""The page in a browser: write, drag the slider, reconstruct, interpolate, edit; and the player as a file of its own."""

import pytest
from browsing import narrow
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from serving import PATIENCE, eventually, in_thread

from jpeg_dlm import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.serve.app import Service
from jpeg_dlm.serve.models import serve_model

pytestmark = pytest.mark.slow
OVERFLOW = "return document.documentElement.scrollWidth - window.innerWidth"


class Page:
    """A person who uses the page."""

    def __init__(self, driver):
        self.driver = driver
        driver.set_page_load_timeout(PATIENCE)

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def type(self, selector, text):
        self.one(selector).clear()
        self.one(selector).send_keys(text)

    def send(self, section):
        self.one(f"#{section} form button").click()
        eventually(lambda: self.one(f"#{section} .result").is_displayed())
        eventually(lambda: self.one(f"#{section}").get_attribute("aria-busy") is None)

    def texts(self, selector):
        return [item.text for item in self.driver.find_elements(By.CSS_SELECTOR, selector)]


def test_the_page(browser):
    model, page = load(None, "cpu"), Page(browser)
    with in_thread(Service({"bundled": serve_model("bundled", model)}, limit_s=PATIENCE)) as client:
        address = f"http://127.0.0.1:{client.port}/"
        browser.get(address)
        eventually(lambda: page.texts("#write [name=model] option"))
        page.type("#write [name=n]", "3")
        page.type("#write [name=seed]", "7")
        page.type("#write [name=prompt]", "xyzzy")
        page.one("#write form button").click()
        eventually(lambda: "xyzzy" in page.one("#write .note").text)
        assert not page.one("#write .result").is_displayed()  # there is no text to play
        page.one("#write [name=prompt]").clear()
        page.send("write")
        assert page.texts("#write .texts li") == list(model.generate(3, seed=7))
        page.one(".stage [type=range]").send_keys(Keys.HOME)
        assert "step 0 of 32" in page.one(".stage output").text

        text = "Seven purple cows in hats are juggling swords on the moon."
        page.type("#reconstruct [name=input]", text)
        page.send("reconstruct")
        before, after = model.round_trip(text)
        lost = sum(a != b for a, b in zip(before, after, strict=True))
        assert lost > 0 and len(page.texts("#reconstruct .lost")) == lost
        assert page.one("#reconstruct .after").text == model.reconstruct(text)[0]

        page.send("interpolate")
        ends = [page.one(f"#interpolate [name={name}]").get_attribute("value") for name in ("first", "second")]
        assert page.one("#interpolate .point").text == model.interpolate(*ends, points=17)[8]
        page.type("#edit [name=seed]", "5")
        page.send("edit")
        assert len(page.texts("#edit .texts li")) > 1

        narrow(browser)
        assert browser.execute_script(OVERFLOW) <= 0
        errors = [entry["message"] for entry in browser.get_log("browser")]
        assert all("422" in error for error in errors)  # refusals that were asked for; nothing that the policy had to stop
        names = browser.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
        assert all(name.startswith((address, "data:")) for name in names)


def test_the_player_is_a_file_of_its_own(browser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "-n", "5", "--watch", "--html", "forming.html"]) == 0
    browser.get((tmp_path / "forming.html").as_uri())
    page, expected = Page(browser), list(load(None, "cpu").generate(5))[:4]
    assert page.texts(".player li") == expected
    page.one("[type=range]").send_keys(Keys.HOME)
    assert page.texts(".player li") != expected and "step 0 of 32" in page.one("output").text
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == []
