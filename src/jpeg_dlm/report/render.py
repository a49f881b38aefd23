"""A report as one HTML page, and texts that form as another: each needs no font, no other file and no other host."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jpeg_dlm.evaluation.table import Span, visible
from jpeg_dlm.report.collect import Report
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.files import write_atomic

FOLDER = Path(__file__).parent
PLAYER = (FOLDER / "player.js").read_text("utf-8")  # shows every element with `data-moments`


def policy(script: str) -> str:
    """Return the content security policy of a single file: whatever its texts smuggled in, only this script may run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'"
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {allowed}; base-uri 'none'; form-action 'none'"


def _page(name: str, **values: Any) -> str:
    """Return a filled-in template: every text is escaped, and characters that could disturb their surroundings are visible."""

    def finalize(value: Any) -> Any:
        return visible(value) if type(value) is str else value

    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=finalize
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    environment.filters["data"] = lambda value: visible(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    environment.tests["span"] = lambda cell: isinstance(cell, Span)
    style = "".join((FOLDER / sheet).read_text("utf-8") for sheet in ("style.css", "player.css"))
    return environment.get_template(name).render(style=style, script=PLAYER, policy=policy(PLAYER), **values)


def render(report: Report) -> str:
    """Return the page of a report."""
    return _page("report.html.j2", report=report)


def single_file(snapshots: Sequence[Mapping[str, Any]], heading: str, command: str) -> str:
    """Return a page with a player that works without a network; `command` made it."""
    return _page("forming.html.j2", snapshots=snapshots, heading=heading, command=command)


def write_report(report: Report, out: Path) -> Path:
    """Write or replace the report in a folder."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"'{out}' is a file: name a folder for the report with --out.")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "index.html", render(report))
    return out / "index.html"
