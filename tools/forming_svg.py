"""Draws docs/forming.svg, an animation of the bundled model's texts: `python tools/forming_svg.py docs/forming.svg`."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len

from jpeg_dlm.api import load
from jpeg_dlm.cli.live_view import AGES, Aged, aged
from jpeg_dlm.evaluation.table import visible
from jpeg_dlm.report.trajectory import Snapshot, TrajectoryRecorder

FRAME_S, HOLD_S = 0.16, 4.0  # how long a frame stays, and the last one

WIDTH, MARGIN, FONT, LINE, GAP = 760, 24, 16, 26, 10  # pixels; GAP lies between two texts
ADVANCE = 0.62 * FONT  # of a character in the widest of the fonts named below
COLUMNS = int((WIDTH - 2 * MARGIN) / ADVANCE)

# Each color has a contrast of at least 4.5 to its background.
STYLE = """
svg { --paper: #ffffff; --edge: #d0d7de; --ink: #57606a; --a0: #6e7781; --a1: #9a6700; --a2: #0969da; --a3: #116329 }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --edge: #30363d; --ink: #9198a1; --a0: #8b949e; --a1: #d29922; --a2: #58a6ff; --a3: #56d364 }
}
text { font: %dpx ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
.note { font-size: 13px; fill: var(--ink) }
.paper { fill: var(--paper); stroke: var(--edge) }
.track { fill: var(--edge) }
.done { fill: var(--a3) }
%s
.frame { opacity: 0 }
.last { opacity: 1 }
@media (prefers-reduced-motion: no-preference) {
%s
}
"""


def draw(moments: Sequence[Snapshot], heading: str) -> str:
    """Return the animation as the text of an SVG file; viewers without animation show the last moment."""
    frames = _pages(moments)
    tall = [max(map(len, lines)) for lines in zip(*frames, strict=True)]  # lines that a text needs in any frame
    tops = [MARGIN + 2 * LINE + LINE * sum(tall[:i]) + GAP * i for i in range(len(tall))]
    height = tops[-1] + LINE * (tall[-1] - 1) + MARGIN
    final = moments[-1]

    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", width=str(WIDTH), height=str(height))
    root.set("viewBox", f"0 0 {WIDTH} {height}")
    root.set("role", "img")
    ET.SubElement(root, "title").text = f"{visible(heading)}: text forming out of noise in {final.steps} steps"
    ET.SubElement(root, "desc").text = "\n".join(_clean(text) for text in final.texts)
    colors = "\n".join(f".a{i} {{ fill: var(--a{i}) }}" for i in range(len(AGES)))
    ET.SubElement(root, "style").text = STYLE % (FONT, colors, "\n".join(_timing(len(frames))))
    _box(root, "paper", 0.5, 0.5, WIDTH - 1, height - 1, rx="8")
    ET.SubElement(root, "text", {"class": "note", "x": str(MARGIN), "y": str(MARGIN + 6)}).text = visible(heading)
    _box(root, "track", MARGIN, MARGIN + 20, WIDTH - 2 * MARGIN, 3)
    for k, (moment, frame) in enumerate(zip(moments, frames, strict=True)):
        last = " last" if k == len(frames) - 1 else ""
        group = ET.SubElement(root, "g", {"class": f"frame{last}", "id": f"f{k}"})
        side = {"class": "note", "x": str(WIDTH - MARGIN), "y": str(MARGIN + 6), "text-anchor": "end"}
        ET.SubElement(group, "text", side).text = f"step {moment.step}/{moment.steps}"
        _box(group, "done", MARGIN, MARGIN + 20, (WIDTH - 2 * MARGIN) * moment.step / moment.steps, 3)
        for top, lines in zip(tops, frame, strict=True):
            for row, words in enumerate(lines):
                _line(group, words, top + row * LINE)
    return ET.tostring(root, encoding="unicode") + "\n"


def _pages(moments: Sequence[Snapshot]) -> list[list[list[list[Aged]]]]:
    """The frames: for each moment, for each text, its lines of words with their ages."""
    words: list[list[Aged]] = [[] for _ in moments[0].texts]
    frames = []
    for moment in moments:
        words = [aged(_clean(text), before) for text, before in zip(moment.texts, words, strict=True)]
        if moment is moments[-1]:  # what is finished stays
            words = [[(word, len(AGES) - 1) for word, _ in row] for row in words]
        frames.append([_wrapped(row) for row in words])
    return frames


def _clean(text: str) -> str:
    return visible(" ".join(text.split()))


def _wrapped(words: Sequence[Aged]) -> list[list[Aged]]:
    """Words in lines of at most COLUMNS characters; a longer word is cut."""
    lines: list[list[Aged]] = [[]]
    used = 0
    for word, age in words:
        for part in (word[i : i + COLUMNS] for i in range(0, len(word), COLUMNS)):
            wide = cell_len(part)
            if used and used + 1 + wide > COLUMNS:
                lines.append([])
                used = 0
            lines[-1].append((part, age))
            used += wide + (used > 0)
    return lines


def _line(group: ET.Element, words: Sequence[Aged], y: float) -> None:
    column = 0
    for word, age in words:
        place = {"class": f"a{min(age, len(AGES) - 1)}", "x": f"{MARGIN + column * ADVANCE:.1f}", "y": str(y)}
        ET.SubElement(group, "text", place).text = word
        column += cell_len(word) + 1


def _box(parent: ET.Element, kind: str, x: float, y: float, width: float, height: float, **more: str) -> None:
    size = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
    ET.SubElement(parent, "rect", {"class": kind, **size, **more})


def _timing(frames: int) -> list[str]:
    """CSS that shows one frame after the other, and the last one for longer."""
    total = (frames - 1) * FRAME_S + HOLD_S
    rules = [f".frame {{ animation: {total:.2f}s step-end infinite }}"]
    for k in range(frames):
        begin, end = (100 * i * FRAME_S / total for i in (k, k + 1))
        hidden = "0% { opacity: 0 } " if k else ""
        gone = f" {end:.3f}% {{ opacity: 0 }}" if k < frames - 1 else ""
        rules.append(f"#f{k} {{ animation-name: k{k} }} @keyframes k{k} {{ {hidden}{begin:.3f}% {{ opacity: 1 }}{gone} }}")
    return rules


if __name__ == "__main__":
    model = load()
    recorder = TrajectoryRecorder(model)
    model.generate(3, seed=7, watch=recorder)
    Path(sys.argv[1]).write_text(draw(recorder.snapshots, recorder.heading), "utf-8")
