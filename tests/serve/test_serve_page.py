"""The page in a browser: type, click, drag, read; in light and dark, on a desk and on a phone."""

import os
from pathlib import Path

import pytest
from browsing import narrow, prefer
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from serving import PATIENCE, eventually, in_thread

from jpeg_dlm import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.serve.app import Limits, Service
from jpeg_dlm.serve.auth import read_keys
from jpeg_dlm.serve.models import load_models, serve_model

pytestmark = pytest.mark.slow
pytest_plugins = ["stand_in"]  # fixtures
SHOTS = os.environ.get("JPEG_DLM_SHOTS")  # a folder for screenshots, to look at
OVERFLOW = "return document.documentElement.scrollWidth - window.innerWidth"
KEY = "a-key-for-this-test"


@pytest.fixture(scope="module")
def bundled():
    return load(None, "cpu", "exact")


@pytest.fixture(scope="module")
def models(micro_folders):
    """The bundled model, and one of another method that cannot edit."""
    return load_models(["bundled", f"ar={micro_folders('ar')}"], "cpu")


@pytest.fixture(scope="module")
def address(models):
    with in_thread(Service(models, Limits(seconds=PATIENCE))) as client:
        yield f"http://127.0.0.1:{client.port}/"


class Page:
    """What a person does with the page."""

    def __init__(self, driver, address):
        self.driver, self.address = driver, address
        driver.set_page_load_timeout(PATIENCE)

    def open(self, link=""):
        self.driver.get("about:blank")
        self.driver.get(self.address + link)
        eventually(lambda: self.all("#write [name=model] option"))

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def type(self, selector, text):
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def send(self, section):
        self.one(f"#{section} form button").click()
        self.wait(section)

    def wait(self, section):
        eventually(lambda: self.one(f"#{section} .result").is_displayed() or self.one(f"#{section} .note").is_displayed())
        eventually(lambda: self.one(f"#{section}").get_attribute("aria-busy") is None)

    def texts(self, selector):
        return [item.text for item in self.all(selector)]

    def shot(self, name):
        if SHOTS:
            height = self.driver.execute_script("return document.documentElement.scrollHeight")
            width = self.driver.execute_script("return window.innerWidth")
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            self.driver.save_screenshot(str(Path(SHOTS) / f"{name}.png"))
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture
def page(browser, address):
    found = Page(browser, address)
    yield found
    assert browser.get_log("browser") == []  # neither errors nor anything that the policy had to stop
    names = browser.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert all(name.startswith((address, "data:")) for name in names)


def test_texts_form_and_the_slider_goes_back(page, bundled):
    page.open()
    assert "ar (AR)" in page.one("#about").text
    page.type("#write [name=n]", "3")
    page.type("#write [name=seed]", "7")
    page.send("write")
    expected = list(bundled.generate(3, seed=7))
    assert page.texts("#write .texts li") == expected
    assert page.texts(".stage .player li")[0] == expected[0] and "step 32 of 32, noise 0.00" in page.one(".stage output").text
    assert len(page.all(".stage canvas")) == 1 and not page.all(".stage .open[title]")
    assert all("settled at step" in word.get_attribute("title") for word in page.all(".stage .w"))
    slider = page.one(".stage [type=range]")
    slider.send_keys(Keys.HOME)
    assert "step 0 of 32, noise 1.00" in page.one(".stage output").text
    first = page.texts(".stage .player li")[0]
    ActionChains(page.driver).drag_and_drop_by_offset(slider, 0, 0).perform()  # the middle of the track
    assert 10 < int(page.one(".stage output").text.split()[1]) < 22
    slider.send_keys(Keys.END)
    assert page.texts(".stage .player li")[0] == expected[0] != first
    page.one(".player-play").click()
    eventually(lambda: page.one(".player-play").get_attribute("aria-label") == "Play")  # it played to the end
    assert "step 32 of 32" in page.one(".stage output").text
    link = page.driver.current_url
    assert "seed=7" in link and "n=3" in link
    page.open(link.removeprefix(page.address))
    page.wait("write")
    assert page.texts("#write .texts li") == expected  # the link makes the same request


def test_side_by_side_with_a_prompt(page, models):
    def written(seed):
        return models["ar"].model.generate(1, seed=seed, temperature=0.5, prompt="The farmer")[0]

    seed = next(seed for seed in range(100) if written(seed).isprintable())  # the page marks other characters
    page.open()
    Select(page.one("#write [name=beside]")).select_by_visible_text("ar")
    page.type("#write [name=prompt]", "The farmer")
    page.type("#write [name=n]", "1")
    page.type("#write [name=seed]", str(seed))
    page.one("#write [name=fast]").click()
    page.type("#write [name=temperature]", "0.5")
    page.send("write")
    assert page.texts(".stage h3") == ["bundled", "ar"]
    forming = page.texts(".stage .player li")
    assert forming[0] == models["bundled"].model.generate(1, seed=seed, fast=True, prompt="The farmer")[0]
    assert forming[1].split() == written(seed).split()
    assert page.texts(".stage h3 + p")[1] == "AR, 12 tokens"


def test_reconstruct_marks_what_is_lost(page, bundled):
    page.open()
    text = "Seven purple cows in hats are juggling swords on the moon."
    page.type("#reconstruct [name=input]", text)
    page.send("reconstruct")
    before, after = bundled.round_trip(text)
    lost = sum(a != b for a, b in zip(before, after, strict=True))
    assert lost > 0 and len(page.all("#reconstruct .lost")) == len(page.all("#reconstruct .new")) == lost
    assert page.one("#reconstruct .before").text == text
    assert page.one("#reconstruct .after").text == bundled.reconstruct(text)[0]
    kept = f"{len(before) - lost} of {len(before)} tokens kept, through 4 latents"
    assert page.one("#reconstruct .kept").text.startswith(kept)


def test_interpolate_and_edit(page, bundled):
    page.open()
    page.send("interpolate")
    ends = [page.one(f"#interpolate [name={name}]").get_attribute("value") for name in ("first", "second")]
    along = bundled.interpolate(*ends, points=17)
    assert page.one("#interpolate .point").text == along[8]
    slider = page.one("#interpolate [type=range]")
    for key, place in ((Keys.HOME, 0), (Keys.ARROW_RIGHT, 1), (Keys.END, 16)):
        slider.send_keys(key)
        assert page.one("#interpolate .point").text == along[place]
    noise = page.one("#edit [name=noise]")
    noise.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.type("#edit [name=seed]", "5")
    page.send("edit")
    expected = bundled.edit("Two dogs are running in the grass.", 2, noise=0.5, seed=5)
    assert page.texts("#edit .texts li")[1] == expected[1]


def test_errors_are_told_in_words(page):
    page.open()
    page.type("#interpolate [name=first]", "dog " * 60)
    page.send("interpolate")
    assert "shorten it" in page.one("#interpolate .note").text
    log = page.driver.get_log("browser")  # the browser itself reports the status of an answer
    assert all("422" in entry["message"] for entry in log)


def test_the_page_fits_a_phone_and_both_schemes(browser, bundled):
    with in_thread(Service({"bundled": serve_model("bundled", bundled)}, Limits(seconds=PATIENCE))) as client:
        schemes_and_sizes(Page(browser, f"http://127.0.0.1:{client.port}/"))


def schemes_and_sizes(page):
    page.open("#write?seed=3&n=4")
    page.wait("write")
    page.type("#reconstruct [name=input]", "Seven purple cows in hats are juggling swords on the moon.")
    for section in ("reconstruct", "interpolate"):
        page.send(section)
    colors = {}
    for scheme in ("light", "dark"):
        prefer(page.driver, scheme)
        colors[scheme] = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert page.driver.execute_script(OVERFLOW) <= 0
        page.shot(f"serve-{scheme}")
    assert colors["light"] != colors["dark"]
    narrow(page.driver)
    page.open("#write?seed=3&n=4")
    page.wait("write")
    assert page.driver.execute_script("return window.innerWidth") == 390 and page.driver.execute_script(OVERFLOW) <= 0
    small = "return [...document.querySelectorAll('button, input, select')].filter(e => e.offsetParent && e.type !== 'checkbox' && e.getBoundingClientRect().height < 30).length"  # noqa: E501
    assert page.driver.execute_script(small) == 0  # a finger finds them
    prefer(page.driver, "light")
    page.shot("serve-phone")
    assert page.driver.get_log("browser") == []


def test_the_keyboard_is_enough(page):
    page.open()
    body = page.one("body")
    body.send_keys(Keys.TAB)
    assert page.driver.switch_to.active_element.get_attribute("class") == "skip"
    field = page.one("#write [name=seed]")
    field.send_keys("1", Keys.ENTER)
    page.wait("write")
    assert page.texts("#write .texts li")
    seen = set()
    for _ in range(40):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        active = page.driver.switch_to.active_element
        seen.add(active.get_attribute("name") or active.get_attribute("aria-label") or active.text)
    assert {"fast", "Write", "Another seed", "Copy link", "Play", "Step", "input", "first", "second", "noise"} <= seen


def test_a_server_with_keys_asks_for_one(browser, models, tmp_path):
    (tmp_path / "keys").write_text(KEY)
    with in_thread(Service(models, Limits(), read_keys(tmp_path / "keys"))) as client:
        browser.get(f"http://127.0.0.1:{client.port}/")
        page = Page(browser, "")
        eventually(lambda: page.one("#access").is_displayed())
        page.type("#access [name=key]", "not-the-right-one")
        page.one("#access button").click()
        eventually(lambda: "needs a key" in page.one("#failure").text)
        page.type("#access [name=key]", KEY)
        page.one("#access button").click()
        eventually(lambda: "ar (AR)" in page.one("#about").text)
        assert not page.one("#access").is_displayed() and not page.one("#failure").is_displayed()


def test_the_player_is_a_file_of_its_own(browser, tmp_path, bundled, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "-n", "5", "--watch", "--html", "forming.html"]) == 0
    browser.get((tmp_path / "forming.html").as_uri())
    page = Page(browser, "")
    expected = list(bundled.generate(5))[:4]
    assert page.texts(".player li") == expected and len(page.all("canvas")) == 4
    slider = page.one("[type=range]")
    slider.send_keys(Keys.HOME)
    assert page.texts(".player li") != expected and "step 0 of 32" in page.one("output").text
    slider.send_keys(*[Keys.ARROW_RIGHT] * 12)
    assert "step 12 of 32" in page.one("output").text
    assert page.one("pre").text == "jpeg-dlm generate -n 5 --watch --html forming.html"
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == [] and browser.execute_script(OVERFLOW) <= 0
    page.shot("player-file")
