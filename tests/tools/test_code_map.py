"""The map of the code: what it reads from a source tree, what it draws, and that the drawn one is of this tree."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from code_map import FOUNDATION, boxes, depths, draw, read  # noqa: E402

TREE = {
    "__init__.py": "from house.top import a\n",
    "settings.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.top import a\n",
    "words.py": "from . import settings\n\ndef late():\n    import house.middle.b\n",
    "facade.py": "from house.top.a import x\n",
    "low/__init__.py": "import house.settings\n",
    "middle/__init__.py": "",
    "middle/b.py": "from ..low import y\nfrom house import words\nimport os\n",
    "top/a.py": "x = 1\nfrom house.middle import b\nfrom house.low import y\n",
    "data/readme.txt": "from house import nothing",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / "house" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "house" / name).write_text(text)
    return tmp_path / "house"


def test_imports_and_sizes_are_those_of_the_files(tree):
    source = read(tree)
    assert source.rooms == {"low", "middle", "top"}
    assert source.early == {
        "settings": set(), "words": {"settings"}, "facade": {"top"}, "low": {"settings"}, "middle": {"low", "words"},
        "top": {"middle", "low"},
    }  # fmt: skip
    assert {part: others for part, others in source.late.items() if others} == {"words": {"middle"}}
    assert source.lines == {"settings": 3, "words": 4, "facade": 1, "low": 1, "middle": 3, "top": 3}
    assert source.files["middle"] == 2


def test_arrows_point_down_and_skip_what_others_imply(tree):
    drawn, ways, odd = boxes(read(tree))
    assert {box.name: box.row for box in drawn} == {FOUNDATION: 0, "low": 1, "middle": 2, "top": 3, "facade": 4}
    assert ways == {FOUNDATION: set(), "low": {FOUNDATION}, "middle": {"low"}, "top": {"middle"}, "facade": {"top"}}
    assert {name: others for name, others in odd.items() if others} == {FOUNDATION: {"middle"}}


def test_a_circle_is_one_step():
    assert depths({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"a": 2, "b": 1, "c": 1, "d": 0}


def test_nothing_overlaps_and_everything_is_inside(tree):
    for source in (read(tree), read(ROOT / "src" / "jpeg_dlm")):
        root = ET.fromstring(draw(source, "house"))
        ns = "{http://www.w3.org/2000/svg}"
        rects = [r for g in root.iter(f"{ns}g") for r in g.iter(f"{ns}rect")]
        places = [tuple(float(r.get(key)) for key in ("x", "y", "width", "height")) for r in rects]
        assert len(places) == len(boxes(source)[0])
        for i, (x, y, w, h) in enumerate(places):
            assert x >= 0 and y >= 0 and x + w <= float(root.get("width")) and y + h <= float(root.get("height"))
            for x2, y2, w2, h2 in places[:i]:
                assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_the_drawn_map_has_the_rooms_of_this_tree():
    """Line counts change with every commit; rooms seldom do."""
    root = ET.fromstring((ROOT / "docs" / "code-map.svg").read_text("utf-8"))
    shown = {g.get("id") for g in root.iter("{http://www.w3.org/2000/svg}g")}
    rooms = {path.parent.name for path in (ROOT / "src" / "jpeg_dlm").glob("*/*.py")}
    assert rooms <= shown, "draw it again: python tools/code_map.py"
