"""The player: escaped data, a policy for its script alone, readable colors."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser

import pytest
from report_folders import HOSTILE

from jpeg_dlm.cli.main import main
from jpeg_dlm.report.player import element, player_script, policy, single_file, style
from jpeg_dlm.results.table import visible

pytest_plugins = ["stand_in"]  # fixtures


def luminance(color: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colors_are_readable_in_light_and_dark():
    found = re.findall(r"--(\w+): (#\w{6})", style().split("@media print")[0] + style().split("/* The player")[1])
    palettes = [{}, {}]
    for name, color in found:  # the light value of a name comes first, then the dark one
        palettes[name in palettes[0] and palettes[0][name] != color].setdefault(name, color)
    for palette in palettes:
        for name in ("ink", "soft", "accent", "warn", "s0", "s1", "s2", "s3", "s4"):
            for ground in ("paper", "shade"):
                bright, dark = sorted((luminance(palette[name]), luminance(palette[ground])), reverse=True)
                assert (bright + 0.05) / (dark + 0.05) >= 4.5, (name, ground, palette)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_texts_stay_texts_in_a_single_file():
    moments = [{"step": i, "steps": 1, "t": float(i), "texts": [HOSTILE, "two"]} for i in range(2)]
    page = single_file(moments, HOSTILE, HOSTILE)
    tags = Tags(page).found
    assert [tag for tag, _ in tags].count("script") == 1 and not [tag for tag, _ in tags if tag in ("img", "link", "iframe")]
    (player,) = [attrs for _, attrs in tags if attrs.get("class") == "player"]
    assert json.loads(player["data-moments"])[1]["texts"] == [visible(HOSTILE), "two"]
    assert "http:" not in page and "https:" not in page and "url(" not in page and "@import" not in page
    digest = base64.b64encode(hashlib.sha256(player_script().encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html.unescape(page) and "script-src" not in policy(None)
    assert f"<script>{player_script()}</script>" in page and "</script" not in player_script()


def test_without_a_script_the_last_texts_are_there():
    shown = element([{"step": 0, "steps": 1, "texts": ["a"]}, {"step": 1, "steps": 1, "texts": ["b <c>"]}], "x")
    assert '<li dir="auto">b &lt;c&gt;</li>' in shown and '<li dir="auto">a</li>' not in shown


@pytest.mark.parametrize("method", ["jpeg-dlm", "ar"])
def test_generate_writes_the_player(method, micro_folders, tmp_path, capsys):
    file, command = tmp_path / "forming.html", ["generate", str(micro_folders(method)), "-n", "2", "--device", "cpu"]
    assert main([*command, "--out", str(tmp_path / "texts.jsonl")]) == 0
    assert main([*command, "--watch", "--svg", str(tmp_path / "forming.svg"), "--html", str(file)]) == 0
    assert f"Wrote {file}" in capsys.readouterr().err
    (player,) = [attrs for _, attrs in Tags(file.read_text("utf-8")).found if attrs.get("class") == "player"]
    moments = json.loads(player["data-moments"])
    texts = [json.loads(line)["prediction"] for line in (tmp_path / "texts.jsonl").read_text("utf-8").splitlines()]
    assert moments[-1]["texts"] == [visible(text) for text in texts] and moments[0]["step"] == 0
    assert ("latents" in moments[0]) == (method == "jpeg-dlm")
    assert main([*command, "--html", str(file)]) == 2 and "already exists" in capsys.readouterr().err
