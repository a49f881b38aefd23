"""The page: nothing in a text becomes more than text, nothing is fetched, everything has a name."""

import base64
import hashlib
import json
from html.parser import HTMLParser

import pytest
from report_folders import HOSTILE, make_results, make_run, make_workshop, tiny_png

from jpeg_dlm.report.collect import collect
from jpeg_dlm.report.page import render
from jpeg_dlm.report.page_blocks import (
    Details,
    Facts,
    Figure,
    Note,
    Paragraph,
    Report,
    Samples,
    Section,
    Verbatim,
    code,
)
from jpeg_dlm.report.player import player_script
from jpeg_dlm.results.table import Table, emphasis, visible

VOID = {"meta", "img", "link", "br", "hr", "input"}
OURS = {
    "html", "head", "meta", "title", "style", "body", "a", "header", "nav", "main", "section", "h1", "h2", "h3", "h4", "h5",
    "h6", "p", "ol", "li", "div", "table", "thead", "tbody", "tr", "th", "td", "dl", "dt", "dd", "pre", "code", "em", "strong",
    "figure", "figcaption", "img", "details", "summary", "script",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "class", "href", "dir", "id", "aria-label", "aria-labelledby", "role",
    "tabindex", "scope", "src", "width", "height", "alt", "start", "open", "data-moments",
}  # fmt: skip


class Page(HTMLParser):
    """Tags with attributes in order, and text by the innermost tag; open and close tags must match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    def text(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def test_hostile_text_stays_text(tmp_path):
    run = make_run(tmp_path / "run <b>x", text=HOSTILE)
    results = make_results(tmp_path / '"><script>', text=HOSTILE)
    page = Page(render(collect([run, results], title=HOSTILE)))
    assert {tag for tag, _ in page.tags} <= OURS
    assert {name for _, attrs in page.tags for name in attrs} <= ATTRIBUTES
    assert page.text("h1") == [visible(HOSTILE)] and visible(HOSTILE) in page.text("li")
    assert "\u202e" not in "".join(text for _, text in page.texts) and "[U+202E]" in page.text("h1")[0]
    assert "Run run <b>x" in page.text("h2") and 'Evaluation "><script>' in page.text("h2")
    assert all(attrs["src"].startswith("data:image/png;base64,") for attrs in page.all("img"))
    assert all(attrs["href"].startswith("#") for attrs in page.all("a"))
    assert page.all("script") == [{}] and page.text("script") == [player_script()]  # ours alone, and the policy says so
    digest = base64.b64encode(hashlib.sha256(player_script().encode()).digest()).decode()
    policy = next(attrs["content"] for attrs in page.all("meta") if attrs.get("http-equiv") == "Content-Security-Policy")
    assert f"script-src 'sha256-{digest}';" in policy and policy.count("script-src") == 1
    (player,) = [attrs for attrs in page.all("div") if attrs.get("class") == "player"]
    moments = json.loads(player["data-moments"])
    assert [moment["step"] for moment in moments] == [10, 20] and moments[1]["texts"][0] == visible(HOSTILE)


def test_policy_landmarks_and_names(tmp_path):
    text = render(collect([make_workshop(tmp_path / "shop")]))
    page = Page(text)
    assert page.all("html") == [{"lang": "en"}]
    policy = next(attrs["content"] for attrs in page.all("meta") if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")
    assert "url(" not in text and "@import" not in text and "http:" not in text and "https:" not in text
    assert [len(page.all(tag)) for tag in ("header", "nav", "main", "h1")] == [1] * 4
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) and {attrs["href"][1:] for attrs in page.all("a")} == set(ids)
    assert all(attrs["alt"] for attrs in page.all("img")) and page.all("img")
    regions = [attrs for attrs in page.all("div") if attrs.get("role") == "region"]
    assert len(regions) == len(page.all("table")) + len(page.all("img"))
    assert all(attrs["aria-label"] and attrs["tabindex"] == "0" for attrs in regions)
    assert all(attrs["scope"] in ("col", "row") for attrs in page.all("th"))


def test_blocks():
    figure = Figure(tiny_png(1000, 40), "what it shows", "caption")
    rows = (
        ("a", "4755.9 ± 489.7", "x"),
        ("b", "1.6 min", ""),
        ("c", "failed", ""),
        ("d", "", "3"),
        (emphasis("e"), "-0.5", "y"),
    )
    table = Table("t", ("system", "Gen-PPL", ""), rows)
    facts = Facts((("Seed", "7"), ("Hash", code("abc"))))
    section = Section(
        "s",
        (Note("careful"), Paragraph("p"), Verbatim("| <v> |"), figure, table, facts, Details("more", (Samples(("x\ny",)),))),
    )
    text = render(Report("title", "about", (section,)))
    page = Page(text)
    (image,) = page.all("img")
    assert image["class"] == "wide" and (image["width"], image["height"], image["alt"]) == ("1000", "40", "what it shows")
    assert base64.b64decode(image["src"].partition(",")[2]) == figure.png
    assert [attrs.get("class") for attrs in page.all("th") if attrs["scope"] == "col"] == [None, "number"]
    assert sum(attrs.get("class") == "number" for attrs in page.all("td")) == 5  # the words beside them are not
    assert page.text("dt") == ["Seed", "Hash"] and page.text("code") == ["| <v> |", "abc"] and page.text("summary") == ["more"]
    assert page.text("em") == ["e"] and page.all("div")[1]["aria-label"] == "t" and "<pre" in text
    assert "x\ny" in page.text("li") and page.all("details") == [{}] and '<p class="note">careful</p>' in text


@pytest.mark.parametrize(
    ("data", "reason"), [(b"GIF89a" + tiny_png()[6:], "not a PNG"), (tiny_png()[:-3], "cut off"), (b"", "not a PNG")]
)
def test_only_whole_pngs(data, reason):
    with pytest.raises(ValueError, match=reason):
        Figure(data, "alt", "caption")


def test_what_cannot_be_seen_is_shown():
    assert visible("a\x00b\u2067c\ud800d\u200fe\nf\tg\r\nh") == "a[U+0000]b[U+2067]c[U+D800]d[U+200F]e\nf\tg\nh"
    assert visible("שלום, naïve 東京 👩🏽‍🚀") == "שלום, naïve 東京 👩🏽‍🚀"
