"""Hooks of `mkdocs build`: the README is the home page, files outside docs/ that pages link to are copied, and a page that
would load anything from another host is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()[^)#:\s]+(?=[)#])")  # of Markdown, to a file
FOREIGN = r"""["']?(?:https?:)?//[^\s"'>]*"""
LOADED = re.compile(
    rf"""<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc={FOREIGN}"""
    rf"""|<link\b(?=[^>]*\srel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*\shref={FOREIGN}"""
)


def site_path(link: str, base: Path) -> str:
    """Return where the site has the target of a link of a page in the folder `base`, a path from the root of the site."""
    target = Path(os.path.normpath(base / link))
    return str(target.relative_to(DOCS)) if target.is_relative_to(DOCS) else f"files/{target.relative_to(ROOT)}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the home page, and what pages link to outside docs/."""
    pages = [(ROOT / "README.md", ROOT), *((page, page.parent) for page in DOCS.rglob("*.md"))]
    outside = {site_path(link, base) for page, base in pages for link in LINK.findall(page.read_text("utf-8"))}
    for path in sorted(path for path in outside if path.startswith("files/")):
        if (source := ROOT / path.removeprefix("files/")).is_file():  # mkdocs warns of a link to any other
            files.append(File.generated(config, path, abs_src_path=str(source)))
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the site has their targets."""
    folder = Path(page.file.src_uri).parent
    base = ROOT if page.file.src_uri == "index.md" else DOCS / folder
    return LINK.sub(lambda link: os.path.relpath(site_path(link[0], base), folder), markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads fonts, scripts, styles or pictures from another host."""
    if loads := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {loads[0]}")
    return output
