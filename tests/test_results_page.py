"""docs/results.md is what tools/results_page.py writes from the stored numbers."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_is_what_the_tool_writes():
    tool = runpy.run_path(str(ROOT / "tools" / "results_page.py"))
    page = tool["page"]()
    assert (ROOT / "docs" / "results.md").read_text("utf-8") == page, "run python tools/results_page.py"
    assert len(page.split()) <= 2500
    shown = {path.stem for path in (ROOT / "docs" / "results").glob("*.json")}
    assert shown == {*tool["read"]("page")["sections"], "page", "dropped"}
