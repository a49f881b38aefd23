"""The animated picture of text forming: whole XML that ends with what was generated, and stands still on request."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from jpeg_dlm.api import load
from jpeg_dlm.cli.forming import COLUMNS, MARGIN, STYLE, WIDTH, draw
from jpeg_dlm.cli.main import main
from jpeg_dlm.report.moments import FRAMES, TEXTS, Moment, Recorder

pytest_plugins = ["stand_in"]  # fixtures
NS = "{http://www.w3.org/2000/svg}"


def frames(svg: str) -> list[ET.Element]:
    return [g for g in ET.fromstring(svg).iter(f"{NS}g") if "frame" in g.get("class", "").split()]


def words(frame: ET.Element) -> list[tuple[float, float, str]]:
    """Where each word stands, and the word."""
    return [(float(e.get("x")), float(e.get("y")), e.text) for e in frame.iter(f"{NS}text") if e.get("class") != "note"]


@pytest.mark.parametrize("method", ["jpeg-dlm", "ar", "mdlm"])
def test_it_shows_every_step_and_ends_with_the_generated_texts(method, micro_folders, tmp_path, capsys):
    folder, file = micro_folders(method), tmp_path / "forming.svg"
    words_of_command = ["generate", str(folder), "-n", "3", "--device", "cpu"]
    assert main(words_of_command) == 0
    printed = capsys.readouterr().out
    assert main([*words_of_command, "--watch", "--svg", str(file)]) == 0
    seen = capsys.readouterr()
    assert seen.out == printed and "Wrote" in seen.err and "step" in seen.err
    svg = file.read_text("utf-8")
    texts = [re.sub(r"^\[\d\] ", "", line) for line in re.split(r"\n(?=\[\d\] )", printed.strip())]
    every = frames(svg)
    expected = re.sub("[\\x00-\\x1f\\x7f-\\x9f]", lambda m: f"[U+{ord(m[0]):04X}]", " ".join(" ".join(texts).split()))
    assert " ".join(word for *_, word in words(every[-1])) == expected
    assert every[-1].get("class") == "frame last" and [f.get("id") for f in every] == [f"f{i}" for i in range(len(every))]
    steps = [e.text for f in every for e in f.iter(f"{NS}text") if e.get("class") == "note"]
    last = int(steps[-1].split("/")[1])
    assert steps == [f"step {k}/{last}" for k in range(last + 1)]


def test_a_file_that_exists_is_kept(micro_folders, tmp_path, capsys):
    file = tmp_path / "forming.svg"
    file.write_text("mine")
    assert main(["generate", str(micro_folders("ar")), "-n", "1", "--svg", str(file)]) == 2
    assert "already exists" in capsys.readouterr().err and file.read_text() == "mine"


HOSTILE = '</text><script>alert(1)</script> &amp; "it\'s" ]]> \x00\x1b[31m \ufffe <!-- 漢字漢字 x' + "y" * 200


def test_text_is_escaped_and_stays_inside():
    svg = draw([Moment(0, 1, (HOSTILE, "a")), Moment(1, 1, (HOSTILE, "<b>"))], "<i> & co")
    root = ET.fromstring(svg)
    assert {e.tag.removeprefix(NS) for e in root.iter()} == {"svg", "title", "desc", "style", "rect", "text", "g"}
    shown = "".join(word for *_, word in words(frames(svg)[-1]))
    assert shown.startswith('</text><script>alert(1)</script>&amp;"it\'s"]]>[U+0000][U+001B][31m[U+FFFE]<!--漢字漢字x')
    assert shown.endswith("y<b>") and shown.count("y") == 200
    height = float(root.get("height"))
    for frame in frames(svg):
        for x, y, word in words(frame):
            wide = len(word) + len(re.findall("[漢字]", word))
            assert x >= MARGIN and x + wide * (WIDTH - 2 * MARGIN) / COLUMNS < WIDTH and 0 < y < height
    places = [(x, y) for x, y, _ in words(frames(svg)[-1])]
    assert len(set(places)) == len(places)


def test_words_change_color_as_they_stay():
    texts = ["a dog runs", "a cat runs", "a cat sits", "a cat sits", "a cat sits"]
    svg = draw([Moment(i, 4, (text,)) for i, text in enumerate(texts)], "x")
    ages = [[e.get("class") for e in f.iter(f"{NS}text") if e.get("class") != "note"] for f in frames(svg)]
    assert ages == [["a0", "a0", "a0"], ["a1", "a0", "a1"], ["a2", "a1", "a0"], ["a3", "a2", "a1"], ["a3", "a3", "a3"]]


def test_one_frame_is_seen_at_a_time_and_the_last_one_stays():
    """The style sheet, read as a browser does: each name of an animation holds a value until its next percentage."""
    svg = draw([Moment(i, 9, (f"text {i}",)) for i in range(10)], "x")
    style = ET.fromstring(svg).findtext(f"{NS}style") or ""
    still, moving = style.split("@media (prefers-reduced-motion: no-preference)")
    assert "animation" not in still and ".frame { opacity: 0 }" in still and ".last { opacity: 1 }" in still
    rules = {int(k): re.findall(r"([\d.]+)% \{ opacity: (\d) \}", body) for k, body in re.findall(r"s k(\d+) \{(.*)\}", moving)}

    def seen(percent: float) -> list[int]:
        return [k for k, stops in rules.items() if [value for at, value in stops if float(at) <= percent][-1] == "1"]

    order = [seen(percent / 10) for percent in range(1000)]
    assert all(len(one) == 1 for one in order)
    assert [one for i, one in enumerate(order) if i == 0 or one != order[i - 1]] == [[k] for k in range(10)]
    assert order.count([9]) > 5 * order.count([0])


def luminance(color: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colors_are_readable_in_light_and_dark():
    palettes = [dict(re.findall(r"--(\w+): (#\w{6})", line)) for line in STYLE.splitlines() if "--paper:" in line]
    assert len(palettes) == 2
    for palette in palettes:
        paper = luminance(palette["paper"])
        for name in ("ink", "a0", "a1", "a2", "a3"):
            bright, dark = sorted((luminance(palette[name]), paper), reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, name


def test_long_samplers_are_shown_in_few_frames(micro_folders):
    recorder = Recorder(load(micro_folders("ar"), "cpu"))
    length = recorder.model.config.data.token_len
    for _batch in range(2):
        for step in range(1001):
            recorder(step, 1000, step / 1000, lambda: recorder.model.sample(1).expand(TEXTS + 2, length))
    steps = [moment.step for moment in recorder.moments]
    assert steps[0] == 0 and steps[-1] == 1000 and FRAMES // 2 < len(steps) <= FRAMES + 1
    assert all(len(moment.texts) == TEXTS for moment in recorder.moments)
