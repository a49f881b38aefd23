"""The package has ten layers, imports point to the left everywhere, and no file asks a library to run what it reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "jpeg_dlm"

LAYERS = (
    {"util", "config"},
    {"nn"},
    {"text", "encoders"},
    {"flow"},
    {"methods", "options", "presets"},
    {"checkpoints"},
    {"training", "sampling", "export", "importing"},
    {"api", "hub"},
    {"evaluation", "cost"},
    {"integrations", "studies", "report", "serve", "cli"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


PARTS = sorted({part_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"})


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every part of the package that a file names anywhere, with its line."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "jpeg_dlm" else [node.module]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("jpeg_dlm."):
            modules = [node.value]
        else:
            continue
        for module in modules:
            names = module.split(".")
            if names[0] == "jpeg_dlm" and len(names) > 1 and names[1] in PARTS:
                yield names[1], getattr(node, "lineno", 0)


def test_every_part_has_a_layer():
    assert sorted(LEVEL) == PARTS


@pytest.mark.parametrize("part", PARTS)
def test_imports_point_to_the_left(part):
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {other}"
        for path in PACKAGE.rglob("*.py")
        if part_of(path) == part
        for other, line in imports(path)
        if LEVEL[other] > LEVEL[part]
    ]
    assert not wrong, "; ".join(wrong)


def test_no_file_asks_a_library_to_run_code_of_a_file():
    switch = re.compile(r"""(trust_remote_code|allow_pickle)["']?\s*[=:]\s*True|weights_only["']?\s*[=:]\s*False""")
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                node.value = ""  # a sentence, or code for users to run
        assert not switch.search(ast.unparse(tree)), path.name
