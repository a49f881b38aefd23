"""The files of the page. They are read when asked for, and load nothing from other hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jpeg_dlm.report.player import player_script, style

# Only files of this server run, and only this server is asked.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)

File = tuple[str, str]  # content and media type


def _own(name: str, kind: str) -> Callable[[], File]:
    return lambda: ((Path(__file__).parent / "page" / name).read_text("utf-8"), kind)


FILES: dict[str, Callable[[], File]] = {
    "/": _own("index.html", "text/html"),
    "/page.js": _own("page.js", "text/javascript"),
    "/page.css": _own("page.css", "text/css"),
    "/player.js": lambda: (player_script(), "text/javascript"),
    "/style.css": lambda: (style(), "text/css"),
}


def page_headers() -> dict[str, str]:
    """Return the headers of every file of the page."""
    return {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
