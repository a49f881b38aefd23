"""The player: a slider over the moments of texts, in the report, on the page of the service and as a file of its own."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jpeg_dlm.results.table import visible

HINT = "Words are colored by the step at which they settled. Play, or move the slider: the arrow keys work too."


def style() -> str:
    """Return the style sheet of the report, the page and the player."""
    return "".join((Path(__file__).parent / name).read_text("utf-8") for name in ("style.css", "player.css"))


def player_script() -> str:
    """Return the script of the player, which shows every element with `data-moments`."""
    return (Path(__file__).parent / "player.js").read_text("utf-8")


def policy(script: str | None) -> str:
    """Return the content security policy of a single file: whatever its texts smuggled in, only this script may run."""
    allowed = ""
    if script is not None:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed = f"script-src 'sha256-{digest}'; "
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {allowed}base-uri 'none'; form-action 'none'"


def head(title: str, script: str | None) -> str:
    """Return the head of a page that is complete by itself; the title is plain text."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">',
            f"<title>{escape(title)}</title>\n<style>\n{style()}</style>\n</head>\n<body>",
        ]
    )


def element(moments: Sequence[Mapping[str, Any]], label: str) -> str:
    """Return the element of a player; without scripts it shows the texts of the last moment."""
    shown = [{**moment, "texts": [visible(text) for text in moment["texts"]]} for moment in moments]
    data = html.escape(json.dumps(shown, ensure_ascii=False, separators=(",", ":")))
    items = "\n".join(f'<li dir="auto">{html.escape(text)}</li>' for text in shown[-1]["texts"])
    return (
        f'<div class="player" data-moments="{data}" role="group" aria-label="{escape(label)}">\n'
        f'<ol class="samples" start="0">\n{items}\n</ol>\n</div>'
    )


def closing(script: str | None) -> str:
    """Return the end of the page."""
    return (f"<script>{script}</script>\n" if script is not None else "") + "</body>\n</html>\n"


def single_file(moments: Sequence[Mapping[str, Any]], heading: str, command: str) -> str:
    """Return a page with a player that works without a network; `command` made it."""
    script, title = player_script(), "Text forming out of noise"
    return "\n".join(
        [
            head(f"{title}: {heading}", script),
            f'<header class="alone">\n<h1>{title}</h1>\n<p>{escape(heading)}</p>\n</header>\n<main class="alone">',
            f"<p>{HINT}</p>",
            element(moments, "Texts at each step"),
            f'<pre tabindex="0"><code>{escape(command)}</code></pre>\n</main>',
            closing(script),
        ]
    )


def escape(text: str) -> str:
    """Return text for HTML; characters that could disturb their surroundings are shown by their codes."""
    return html.escape(visible(text))
