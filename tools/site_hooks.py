"""Hooks of `mkdocs build`: README, CONTRIBUTING and notebooks are pages, files outside docs/ that pages link to are copied,
and a page that would load anything from another host is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {ROOT / "README.md": "index.md", ROOT / "CONTRIBUTING.md": "contributing.md"}  # outside docs/
LINK = re.compile(r"(?<=\]\()[^)#:\s]+(?=[)#])")  # of Markdown, to a file
FOREIGN = r"""["']?(?:https?:)?//[^\s"'>]*"""
LOADED = re.compile(
    rf"""<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc={FOREIGN}"""
    rf"""|<link\b(?=[^>]*\srel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*\shref={FOREIGN}"""
)


def site_path(link: str, base: Path) -> str:
    """Return where the site has the target of a link of a page in the folder `base`, a path from the root of the site."""
    target = Path(os.path.normpath(base / link))
    if target in PAGES:
        return PAGES[target]
    if target.is_relative_to(DOCS):
        return str(target.relative_to(DOCS).with_suffix(".md" if target.suffix == ".ipynb" else target.suffix))
    return f"files/{target.relative_to(ROOT)}"


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and the texts and pictures that the code gave."""
    parts = [f'<a href="{path.name}" download>This page is a notebook.</a>']
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source, is_code = "".join(cell["source"]), cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if is_code else source)
        for output in cell.get("outputs", ()):
            data = output.get("data") or {"text/plain": output["text"]}
            if "image/png" in data:
                parts.append(f"![](data:image/png;base64,{''.join(data['image/png'].split())})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, one for each notebook, and the files that pages link to outside docs/."""
    pages = [*((page, ROOT) for page in PAGES), *((page, page.parent) for page in DOCS.rglob("*.md"))]
    outside = {site_path(link, base) for page, base in pages for link in LINK.findall(page.read_text("utf-8"))}
    for path in sorted(path for path in outside if path.startswith("files/")):
        if (source := ROOT / path.removeprefix("files/")).is_file():  # mkdocs warns of a link to any other
            files.append(File.generated(config, path, abs_src_path=str(source)))
    for path in DOCS.glob("*.ipynb"):
        files.append(File.generated(config, f"{path.stem}.md", content=notebook_page(path)))
    for path, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the site has their targets."""
    folder = Path(page.file.src_uri).parent
    base = ROOT if page.file.src_uri in PAGES.values() else DOCS / folder
    return LINK.sub(lambda link: os.path.relpath(site_path(link[0], base), folder), markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads fonts, scripts, styles or pictures from another host."""
    if loads := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {loads[0]}")
    return output
