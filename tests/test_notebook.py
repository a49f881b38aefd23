"""docs/notebook.ipynb runs from top to bottom in a new kernel, and what is stored in it is what its cells give."""

from __future__ import annotations

import runpy
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "notebook.ipynb"
VARY = {"translations", "rules-check"}  # texts of a model that other weights or roundings change


def kinds(cell: nbformat.NotebookNode) -> list[list[str]]:
    """Return the kind of each output of a cell: the name of its stream, or the types of its data."""
    return [[output["name"]] if output.output_type == "stream" else sorted(output["data"]) for output in cell.outputs]


def words(cell: nbformat.NotebookNode) -> list[str]:
    return " ".join(output.get("text") or output["data"]["text/plain"] for output in cell.outputs).split()


@pytest.mark.slow
def test_every_cell_runs_and_gives_what_is_stored():
    stored = nbformat.read(PAGE, 4)
    nbformat.validate(stored)
    assert PAGE.stat().st_size < 400_000
    assert not [place for place in (str(ROOT), str(Path.home()), "/tmp/") if place in PAGE.read_text("utf-8")]
    done = runpy.run_path(str(ROOT / "tools" / "notebook.py"))["executed"](stored)
    for before, after in zip(stored.cells, done.cells, strict=True):
        if after.cell_type == "code":
            assert after.execution_count == before.execution_count, f"{after.id}: run make notebook"
            assert kinds(after) == kinds(before), after.id
            if after.id not in VARY:
                same = sum(a == b for a, b in zip(words(before), words(after), strict=False))
                assert same >= 0.8 * len(words(after)), after.id
