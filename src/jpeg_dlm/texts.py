"""Texts as a notebook shows them."""

from __future__ import annotations

import html

STYLE = "max-width: 46rem; white-space: pre-wrap"  # lines of a length that can be read


class Texts(list[str]):
    """A list of strings, which a notebook displays as a numbered list with their own line breaks."""

    def _repr_html_(self) -> str:
        items = "".join(f'<li dir="auto" style="{STYLE}">{html.escape(text)}</li>' for text in self)
        return f'<ol start="0">{items}</ol>'
