"""The rooms of the package stand in the order that the README states: imports point to the left, also inside functions."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "jpeg_dlm"


def stated_order() -> list[str]:
    """Return the parts of the package from left to right, read from the README's one line with arrows."""
    line = next(line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if line.count(" ← ") > 5)
    return re.findall(r"`(\w+)`", line)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every part of the package that a file imports anywhere, for types too, with its line."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "jpeg_dlm" else [node.module]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            names = module.split(".")
            if names[0] == "jpeg_dlm" and len(names) > 1 and names[1] not in ("__version__", "load", "Model"):
                yield names[1], node.lineno


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


PARTS = sorted({part_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"})


def test_the_readme_names_every_part():
    assert sorted(stated_order()) == PARTS


@pytest.mark.parametrize("room", PARTS)
def test_imports_point_to_the_left(room):
    place = {name: i for i, name in enumerate(stated_order())}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {other}"
        for path in PACKAGE.rglob("*.py")
        if part_of(path) == room
        for other, line in imports(path)
        if place[other] > place[room]
    ]
    assert not wrong, "; ".join(wrong)


def test_no_two_modules_or_classes_have_one_name():
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    modules = Counter(path.stem for path in files)
    classes = Counter(
        node.name for path in files for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in (modules + classes).items() if count > 1] == []
