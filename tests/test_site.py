"""The hooks of the web site: where links lead, and which pages are refused. `make lint` builds the site itself."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parent.parent
HOOKS = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))


def page(path: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=path))


@pytest.mark.parametrize(
    ("path", "link", "leads_to"),
    [
        ("index.md", "docs/results.md", "results.md"),
        ("index.md", "docs/notebook.ipynb", "notebook.md"),
        ("extending.md", "../CONTRIBUTING.md#the-map", "contributing.md#the-map"),
        ("index.md", "examples/jpeg_dlm_in_one_file.py", "files/examples/jpeg_dlm_in_one_file.py"),
        ("systems/jpeg-dlm.md", "../data.md#pairs", "../data.md#pairs"),
        ("extending.md", "../tests/toy_system.py", "files/tests/toy_system.py"),
        ("data.md", "https://example.org/a#b", "https://example.org/a#b"),
        ("data.md", "#pairs", "#pairs"),
    ],
)
def test_links_lead_to_pages_and_to_copies_of_files(path: str, link: str, leads_to: str):
    assert (
        HOOKS["on_page_markdown"](f"[a]({link}) and ![b]({link})", page(path), None, None)
        == f"[a]({leads_to}) and ![b]({leads_to})"
    )


@pytest.mark.parametrize(
    "loads",
    [
        '<script src="https://example.org/a.js"></script>',
        "<script async src=//example.org/a.js></script>",
        '<img alt="" src="http://example.org/a.png">',
        '<link rel="stylesheet" href="https://example.org/a.css">',
        '<link href="https://example.org" rel="preconnect" crossorigin>',
    ],
)
def test_a_page_that_loads_from_another_host_is_refused(loads: str):
    own = '<script src="assets/a.js"></script><link rel="icon" href="a.png"><a href="https://example.org">elsewhere</a>'
    assert HOOKS["on_post_page"](own, page("a.md"), None) == own
    with pytest.raises(PluginError, match="another host"):
        HOOKS["on_post_page"](own + loads, page("a.md"), None)
